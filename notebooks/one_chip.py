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
# # One chip, a public pair
#
# A target of 3B parameters and a draft of 0.5B from the hub, on one TPU or GPU, through the public interface alone: read
# them, let them answer, and see which draft length K pays on this device. Where the hub is out of reach, or there is no chip
# to hold them, the pair that comes with the package takes their place and writes Python.

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
    wanted = [f"specsamp[figures,hf] @ git+{REPOSITORY}"]
    if glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*"):
        wanted.append("jax[tpu]")
    elif shutil.which("nvidia-smi"):  # the driver decides which CUDA it can run
        seen = subprocess.run(["nvidia-smi"], capture_output=True, text=True).stdout
        wanted.append("jax[cuda12]" if re.search(r"CUDA Version: *12", seen) else "jax[cuda13]")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)

# %% [markdown]
# ## On a TPU: what works there?
#
# No TPU has run this code yet. With `REPORT = True`, the next cell finds out in about twenty minutes: it compares every kernel
# with its plain form, audits a pair, and puts measured times beside the compiler's estimates. Run again, it continues. Please
# send `first_tpu.json` and the table as an issue. It comes first, since only one process can hold the chip.

# %%
REPORT = False

if REPORT:
    command = [sys.executable, "-m", "specsamp", "first-tpu", "--plain", "--output=first_tpu.json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as report:
        for line in report.stdout:
            print(line, end="")

# %%
from specsamp import doctor

doctor.check()  # a TPU that JAX does not see would go unnoticed

# %% [markdown]
# ## Read the pair
#
# Before a tensor is read, all headers are checked against the configs, and the tokenizers against each other. Whether
# a pair fits a chip, and how fast it should be there, a compiler can say without one: `launch/compile_report.py`.

# %%
import time

import jax
import matplotlib.pyplot as plt
import numpy as np

from specsamp import chain, generate, load_pair, temperature, top_p
from specsamp.analysis.figures import BLUE, GREY, set_style
from specsamp.checkpoints.public_pair import read_pair

device, pair = jax.devices()[0], None
print(f"{jax.device_count()} x {device.device_kind} ({device.platform}), JAX {jax.__version__}")
name = "Qwen2.5-3B-Instruct with a draft of 0.5B"
if device.platform != "cpu":  # 7 GB are much for a CPU
    try:
        pair = read_pair("Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct", say=print)
    except (FileNotFoundError, ValueError) as error:  # no network, or no library for the hub
        print(str(error).splitlines()[0])
asked = ["Why is the sky blue?", "Write a haiku about the sea.", "What is a prime number?"]
prompts = [[{"role": "user", "content": question}] for question in asked]
if pair is None:
    pair, name = load_pair("python"), "the pair that comes with the package"
    prompts = asked = ["def fibonacci(n):", "def copy_file(source, target):", "def read_lines(path):"]
print(f"This is {name}.")

# %% [markdown]
# ## Generate

# %%
SAMPLING, TOKENS = chain(temperature(0.8), top_p(0.95)), 64
for prompt, done in zip(asked, generate(pair, prompts, TOKENS, sampling=SAMPLING, draft_length=4, seed=0)):
    stats = done.stats
    print(f"{stats.emitted} tokens in {stats.rounds} rounds, {stats.acceptance_rate:.0%} of judged drafts accepted")
    print(f"{prompt}{done.text if done.text[:1].isspace() else ' ' + done.text}\n")

# %% [markdown]
# ## Which K pays here?
#
# Each prompt alone (batch 1) with each K, in turn, so that whatever else the machine does falls on all of them. The clock runs from
# prompt to text. K = 0 is plain decoding, by the same loop. The first pass compiles and is not counted.
# `specsamp.analysis.draft_length.calibrate` does this with more care; its `usual` is a K.

# %%
LENGTHS, PASSES = (0, 1, 2, 4, 8), 4


def ms_per_token(prompt, draft_length: int, seed: int) -> float:
    start = time.perf_counter()
    (done,) = generate(pair, [prompt], TOKENS, sampling=SAMPLING, draft_length=draft_length, seed=seed)
    return (time.perf_counter() - start) / done.stats.emitted * 1e3


ms = np.array([[[ms_per_token(prompt, K, turn) for K in LENGTHS] for prompt in prompts] for turn in range(PASSES)])
ms_K = np.median(ms[1:], axis=(0, 1))

# %%
set_style()
low, high = np.quantile(ms[1:], (0.25, 0.75), axis=(0, 1))
figure, axis = plt.subplots(figsize=(6.4, 3))
axis.errorbar(LENGTHS, ms_K, (ms_K - low, high - ms_K), color=BLUE, marker="o", capsize=3, label="median and quartiles")
axis.axhline(ms_K[0], color=GREY, linestyle="--", label="plain decoding")
axis.set(title=f"K = {LENGTHS[ms_K.argmin()]} is the fastest here: {ms_K[0] / ms_K.min():.2f}x plain decoding")
axis.set(xlabel="K, drafted per round", ylabel="ms per token, batch 1", xticks=LENGTHS, ylim=(0, None))
axis.legend()
plt.show()
