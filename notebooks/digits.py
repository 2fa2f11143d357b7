# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Digits, pixel by pixel
#
# Speculative sampling needs tokens, not text. Here a token is a grey level: the target writes images of handwritten digits
# of 8 x 8 pixels row by row, after a first token that names the digit, and a draft with one layer proposes four pixels at a
# time. Both were trained in minutes by the commands of `configs/digits.py`. The images follow the target's distribution
# exactly; this notebook shows them, shows who drew which pixel, and checks the claim.

# %%
REPOSITORY = "https://github.com/OWNER/specsamp"  # put your repository here, see notebooks/README.md

import glob
import importlib.util
import re
import shutil
import subprocess
import sys

if importlib.util.find_spec("specsamp") is None:  # a fresh machine, such as Colab's
    assert "/OWNER/" not in REPOSITORY, "put the owner of the repository in place of OWNER above"
    wanted = [f"specsamp[figures] @ git+{REPOSITORY}"]
    if glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*"):
        wanted.append("jax[tpu]")
    elif shutil.which("nvidia-smi"):  # the driver decides which CUDA it can run
        seen = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
        wanted.append("jax[cuda12]" if re.search(r"CUDA Version: *12", seen) else "jax[cuda13]")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)

# %%
from specsamp import doctor

doctor.check()  # a TPU that JAX does not see would go unnoticed

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console

from specsamp import Method, ModelDrafter, TokenRule, chain, generate, load_pair, temperature
from specsamp.analysis import report
from specsamp.analysis.figures import DRAFT, TARGET, set_style
from specsamp.evaluation.audit.checks import Settings, audit, audit_table
from specsamp.evaluation.audit.subject import Subject
from specsamp.sampling.synthetic import SyntheticAcceptance
from specsamp.training.digits import CLASSES, LEVELS, SIDE, prompt

device, console = jax.devices()[0], Console(width=110)
print(f"{jax.device_count()} x {device.device_kind} ({device.platform}), JAX {jax.__version__}")
set_style()

# %%
pair, K, SAMPLES = load_pair("digits"), 4, 100
how = {"sampling": chain(temperature(1.0)), "num_samples": SAMPLES, "stop": []}
drawn = generate(pair, [prompt(number) for number in range(CLASSES)], SIDE * SIDE, draft_length=K, **how)
pixels = np.array([one.tokens for one in drawn]).reshape(CLASSES, SAMPLES, SIDE, SIDE)
drafted = np.array([one.from_draft for one in drawn]).reshape(CLASSES, SAMPLES, SIDE, SIDE)
print(f"{pixels.size / sum(one.stats.rounds for one in drawn):.2f} pixels per call of the target, of at most {K + 1}")

# %% [markdown]
# ## Who drew which pixel
#
# Above, one image of each digit. Below, the same images: orange pixels were proposed by the draft and accepted; blue ones
# are the target's own, corrections of a rejected pixel or the bonus after a draft that was kept whole. Empty pixels are pale.

# %%
ink = np.minimum(pixels / (LEVELS - 1), 1.0)[..., None]
colours = np.where(
    drafted[..., None], np.array(plt.matplotlib.colors.to_rgb(DRAFT)), plt.matplotlib.colors.to_rgb(TARGET)
)
figure, rows = plt.subplots(2, CLASSES, figsize=(11, 2.6))
for number in range(CLASSES):
    rows[0, number].imshow(1 - np.repeat(ink[number, 0], 3, axis=-1))
    rows[1, number].imshow(1 - (0.25 + 0.75 * ink[number, 0]) * (1 - colours[number, 0]))
for axes in rows.flat:
    axes.set_axis_off()
rows[0, 0].set_title("drawn", loc="left")
rows[1, 0].set_title("by whom", loc="left")
plt.show()

# %% [markdown]
# ## Where the draft is right
#
# The share of pixels that the draft drew, by position and by class. The empty margins are easy; strokes are not.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
image = left.imshow(drafted.mean((0, 1)), cmap="Greys", vmin=0, vmax=1)
left.set(title="share drawn by the draft, by position", xticks=(), yticks=())
left.grid(False)
figure.colorbar(image, ax=left)
right.bar(range(CLASSES), drafted.mean((1, 2, 3)), color=DRAFT)
right.set(title="by class", xticks=range(CLASSES), ylim=(0, 1))
plt.show()

# %% [markdown]
# ## The audit
#
# The checks of `launch/audit.py`: samples follow the target's distribution, the text of a seed does not depend on the draft
# under the coupled rule, and so on. An image is a text here.

# %%
subject = Subject(
    pair=pair,
    prompts=[prompt(number) for number in range(CLASSES)],
    method=Method(drafter=ModelDrafter(pair.draft, K), sampling=chain(temperature(1.0))),
    max_new_tokens=SIDE * SIDE,
    seed=0,
)
found = audit(subject, Settings(detect=0.1))
report.print_tables([audit_table(report.as_json(found.checks))], console)
assert found.passed, found.summary

# %% [markdown]
# ## Can anyone tell?
#
# Small networks learn to tell two sets of images apart, and are asked about images that they have not seen. Between plain
# and speculative images they do no better than chance. The control: images whose drafted pixels were all accepted, which
# is what a wrong rule would draw.

# %%
EACH = 2 * SAMPLES  # images of each class and set
sets = {
    "plain": {"draft_length": 0, "seed": 1},
    "plain again": {"draft_length": 0, "seed": 2},
    "speculative": {"draft_length": K, "seed": 3},
    "every draft accepted": {"draft_length": K, "seed": 4, "rule": SyntheticAcceptance(TokenRule(), 1.0)},
}


def images(samples, **changes):
    drawn = generate(
        pair, [prompt(i) for i in range(CLASSES)], SIDE * SIDE, **{**how, "num_samples": samples, **changes}
    )
    return jnp.array([one.tokens for one in drawn]) / (LEVELS - 1)


def told_apart(ours, theirs, steps=300, width=64):
    """The share of unseen images that a network of one hidden layer assigns to their set; chance is 1/2."""
    x, y = jnp.concatenate([ours, theirs]), jnp.repeat(jnp.array([-1.0, 1.0]), len(ours))
    seen = jnp.arange(len(x)) % 2 == 0
    keys = jax.random.split(jax.random.key(0), 2)
    first = (jax.random.normal(keys[0], (x.shape[1], width)) / 8, jax.random.normal(keys[1], (width,)) / 8)

    def score(params):
        return jnp.maximum(x @ params[0], 0) @ params[1]

    def loss(params):
        squares = sum(jnp.sum(p**2) for p in params)
        return jnp.mean(jax.nn.softplus(-y * score(params)), where=seen) + 1e-3 * squares

    def step(carry, _):
        params, momentum = carry
        momentum = jax.tree.map(lambda m, g: 0.9 * m - 0.1 * g, momentum, jax.grad(loss)(params))
        return (jax.tree.map(jnp.add, params, momentum), momentum), None

    start = (first, jax.tree.map(jnp.zeros_like, first))
    (params, _), _ = jax.lax.scan(step, start, None, length=steps)
    return float(jnp.mean(score(params) * y > 0, where=~seen))


of_set = {name: images(EACH, **changes) for name, changes in sets.items()}
margin = 3.3 * 0.5 / np.sqrt(len(of_set["plain"]))  # one false alarm in a thousand
apart = {name: told_apart(of_set["plain"], other) for name, other in of_set.items() if name != "plain"}
rows = [(name, f"{share:.3f}", f"{0.5 - margin:.3f} to {0.5 + margin:.3f}") for name, share in apart.items()]
header = ("images", "told apart from plain ones", "chance")
report.print_tables([report.Table(title="A discriminator", header=header, rows=rows)], console)
assert abs(apart["speculative"] - 0.5) < margin < apart["every draft accepted"] - 0.5
