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
# # One chip, real models
#
# A public pair of one family, 3B and 0.5B parameters, on a single TPU v5e. First the compiler: does it fit, and what
# is to be expected? Then the weights, a text, and the benchmark. Without a chip to hold them no weights are downloaded:
# the same steps then run on a tiny random pair, written in the same layout of files.

# %%
REPOSITORY = "https://github.com/OWNER/specsamp"  # launch/set_repository.py writes the address here

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

# %%
from specsamp import doctor

doctor.check()  # a TPU that JAX does not see would go unnoticed

# %%
import pathlib
import tempfile

import jax
import matplotlib.pyplot as plt
from rich.console import Console

from specsamp import (
    ModelDrafter,
    TokenRule,
    TransformerConfig,
    TransformerLM,
    chain,
    generate,
    load_pair,
    temperature,
    top_p,
)
from specsamp.analysis import report, tables
from specsamp.analysis.acceptance import Profile
from specsamp.analysis.benchmark import benchmark
from specsamp.analysis.costs import ModelSize, Roofline
from specsamp.analysis.planner import make_plan
from specsamp.analysis.workload import Workload
from specsamp.checkpoints.export import export
from specsamp.checkpoints.public_pair import read_pair
from specsamp.checkpoints.published import published_config
from specsamp.decoding.loop import decode_window
from specsamp.text_format import human_count
from specsamp.tpu.calibration import estimate
from specsamp.tpu.costs import banded_costs
from specsamp.tpu.program import USABLE
from specsamp.tpu.programs import WINDOW
from specsamp.tpu.stack import Stack, facts
from specsamp.tpu.topology import described_mesh, parse

device, console = jax.devices()[0], Console(width=110)
print(f"{jax.device_count()} x {device.device_kind} ({device.platform}), JAX {jax.__version__}")
DOWNLOAD = device.platform != "cpu"  # 7 GB; True downloads to a CPU as well
stands = "No TPU and no GPU: a tiny random pair stands for the real one."
print("The real pair will be downloaded." if DOWNLOAD else stands)

TARGET, DRAFT, BOTH, WRONG, GREY = "#1f6fb4", "#c98a1b", "#3a8f5c", "#d1495b", "#8a8f98"
plt.rcParams.update(
    {
        "figure.dpi": 110,
        "figure.constrained_layout.use": True,
        "font.size": 9,
        "axes.titlesize": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlelocation": "left",
        "legend.frameon": False,
    }
)

# %% [markdown]
# ## Does it fit?
#
# Shapes are enough for that. A step streams all weights and the cache once, so bytes over bandwidth is a floor of its
# time.

# %%
NAMES = {"target": "Qwen/Qwen2.5-3B", "draft": "Qwen/Qwen2.5-0.5B"}
CHIP, SLOTS, K = "v5e:1x1", 2048, 4
GIB = 2**30

configs = {side: published_config(name) for side, name in NAMES.items()}
chip, _ = parse(CHIP)
shapes = {
    side: ModelSize(
        weight_bytes=c.num_parameters * c.compute_dtype.itemsize,
        parameters=c.num_parameters,
        kv_bytes_per_token=c.kv_bytes_per_token,
    )
    for side, c in configs.items()
}
rows = []
for side, shape in shapes.items():
    cache = SLOTS * shape.kv_bytes_per_token
    floor_ms = (shape.weight_bytes + cache) / chip.hbm_bytes_per_second * 1e3
    sizes = f"{shape.weight_bytes / GIB:.2f}", f"{cache / GIB:.3f}"
    rows.append((NAMES[side], human_count(shape.parameters), *sizes, f"{floor_ms:.2f}"))
header = ("", "parameters", "weights, GiB", f"{SLOTS} slots, GiB", "floor of a step, ms")
title = f"In bfloat16, on a chip with {chip.hbm_bytes / GIB:.0f} GiB and {chip.hbm_bytes_per_second / 1e9:.0f} GB/s"
report.show([report.Table(title=title, header=header, rows=rows)], console)
left = USABLE * chip.hbm_bytes - sum(shape.weight_bytes for shape in shapes.values())
most_rows = int(left / (SLOTS * sum(shape.kv_bytes_per_token for shape in shapes.values())))
print(f"room for {most_rows} rows of {SLOTS} slots, temporaries aside" if most_rows > 0 else f"too much for {CHIP}")

# %% [markdown]
# ## What does the TPU's compiler say?
#
# `libtpu` compiles for a TPU that is not there. A layer costs what the next one costs, so two and four layers are
# compiled at full width and continued in a straight line; `launch/compile_report.py` compiles all of them, and the
# whole loop. Nothing runs: these are **compiler estimates**, calibrated on published steps of TPU v5e.

# %%
try:
    mesh = described_mesh(CHIP)
except RuntimeError as error:  # libtpu exists for Linux on x86-64 only
    mesh = None
    print(f"{error}\nThe forecast below takes the roofline instead.")

if mesh is None:
    speeds = dict(bytes_per_second=chip.hbm_bytes_per_second, flops_per_second=chip.flops_per_second)
    costs = Roofline(**shapes, **speeds, default_context=SLOTS)
else:
    stacks = {side: Stack(config, mesh, CHIP, slots=SLOTS) for side, config in configs.items()}
    calls = {"draft step": ("draft", WINDOW), "target step": ("target", WINDOW), "score": ("target", K + 1)}
    programs = {name: stacks[side].call(tokens) for name, (side, tokens) in calls.items()}
    told = {name: facts(program, CHIP) for name, program in programs.items()}
    rows = []
    for name, fact in told.items():
        traffic = f"{fact['hbm_bytes'] / 1e6:,.0f}", f"{fact['over_floor']:.2f}"
        times = f"{fact['streaming_ms']:.2g}", f"{fact['cycles_ms']:.2g}"
        what = f"{name}, {programs[name].tokens} tokens"
        rows.append((what, *traffic, *times, str(estimate(CHIP.partition(":")[0], fact["work"]))))
    header = ("", "traffic, MB", "over floor", "streaming, ms", "cycles, ms", "calibrated, ms")
    title = f"One call on {CHIP}, batch 1, {SLOTS} slots (compiler estimate)"
    report.show([report.Table(title=title, header=header, rows=rows)], console)
    held = programs["score"].memory.total + programs["draft step"].memory.arguments
    print(f"memory of a round: {held / GIB:.2f} of {chip.hbm_bytes / GIB:.0f} GiB")
    # Scoring waits for the weights, not for arithmetic: some more rows cost nothing.
    works, lengths = {name: fact["work"] for name, fact in told.items()}, (0, 1, 8)
    calls = [[works["score"], *[works["draft step"]] * k] if k else [works["target step"]] for k in lengths]
    costs = banded_costs(lengths, [estimate(CHIP.partition(":")[0], *of_round) for of_round in calls])

# %% [markdown]
# ## What to expect
#
# How fast depends on how much is accepted, and that is known only when text is decoded. So: the speedup for every K, by
# acceptance rate.

# %%
RATES, LENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9), range(13)
plans = {rate: make_plan(Profile.of_rate(rate), costs, draft_lengths=LENGTHS) for rate in RATES}
figure, axis = plt.subplots(figsize=(6.4, 3.4))
for rate, plan in plans.items():
    colour = plt.colormaps["viridis"](1.15 - rate)
    speedups = [plan[k].speedup.value for k in LENGTHS]
    axis.plot(LENGTHS, speedups, color=colour)
    axis.text(LENGTHS[-1] + 0.2, speedups[-1], f"acceptance {rate}", color=colour, va="center")
    axis.plot(plan.best.draft_length, plan.best.speedup.value, "o", color=colour, markersize=5)
axis.axhline(1, color=GREY, linewidth=0.8, linestyle="--")
source = "roofline" if mesh is None else "calibrated compiler estimate"
axis.set(title=f"Speedup on {CHIP}, batch 1 ({source}); dots: the best K")
axis.set(xlabel="K, drafted per round", ylabel="times plain decoding")
plt.show()
print(f"plain decoding: {plans[0.5][0].ms_per_token.value:.2g} ms per token")

# %% [markdown]
# ## Weights
#
# Before a tensor is read, all headers are checked against the configs, and the tokenizers against each other.


# %%
def write_tiny(folder: pathlib.Path) -> dict[str, str]:
    """Writes two folders as the hub has them: config, tokenizer, safetensors; random weights."""
    tokenizer = load_pair("python").tokenizer
    for number, (side, num_layers) in enumerate((("target", 4), ("draft", 1))):
        config = TransformerConfig(
            vocab_size=tokenizer.vocab_size,
            width=128,
            num_layers=num_layers,
            num_heads=4,
            num_kv_heads=2,
            positions="rotary",
            gated=True,
            activation="silu",
            tied=False,
        )
        export(str(folder / side), config, TransformerLM(config).init(jax.random.key(number)), tokenizer)
    return {side: str(folder / side) for side in NAMES}


def read(names: dict[str, str]):
    dtype = "float32" if device.platform == "cpu" else "bfloat16"
    return read_pair(names["target"], names["draft"], dtype=dtype, say=print)


pair, folder = None, tempfile.TemporaryDirectory()
if DOWNLOAD:
    try:
        pair = read(NAMES)
    except (FileNotFoundError, ValueError) as error:  # no network, or no library for the hub
        print(f"{str(error).splitlines()[0]}\n")
is_real = pair is not None
if not is_real:
    names = write_tiny(pathlib.Path(folder.name))
    for path in sorted(pathlib.Path(folder.name).glob("*/*")):
        print(f"{path.parent.name}/{path.name:24}{path.stat().st_size:>12,} bytes")
    pair = read(names)
    print("\nThis is NOT the real pair: it is tiny, and its weights are random. What follows shows the way;")
    print("its text, acceptance and speed mean nothing.")

# %% [markdown]
# ## Generate

# %%
PROMPTS = ("The history of the steam engine begins", "def fibonacci(n):", "Question: Why is the sky blue?\nAnswer:")
SAMPLING, TOKENS = chain(temperature(0.8), top_p(0.95)), 48
for done in generate(pair, PROMPTS, TOKENS, sampling=SAMPLING, draft_length=K, seed=0):
    stats = done.stats
    print(f"{stats.emitted} tokens in {stats.rounds} rounds, {stats.acceptance_rate:.0%} of judged drafts accepted")
    print(f"  {(PROMPTS[done.prompt_index] + done.text)!r:.130}\n")

# %% [markdown]
# ## Benchmark
#
# Plain and speculative decoding in turn, in one process: believe ratios. Then a round taken apart.

# %%
tokens = tuple(tuple(pair.tokenizer.encode(prompt)) for prompt in PROMPTS)
workload = Workload(prompts=tokens, prompt_length=max(map(len, tokens)), max_new_tokens=TOKENS, repeats=4)
result = benchmark(pair, ModelDrafter(pair.draft, K, decode_window()), TokenRule(), SAMPLING, workload)
report.show(tables.result_tables(result, "" if is_real else "random pair"), console)

# %% [markdown]
# ## As expected?

# %%
counts, assumed = result.acceptance, 0.7
told = f"with the measured acceptance of {counts.rate:.2f}" if is_real else f"at an assumed acceptance of {assumed}"
profile = Profile.of_histogram(counts.accepted_counts, counts.reached) if is_real else Profile.of_rate(assumed)
plan = make_plan(profile, costs, draft_lengths=[K])
forecast = [f"{plan[length].ms_per_token.value:.2g}" for length in (0, K)]
rows = [(f"forecast for {CHIP} ({source})", *forecast, f"{plan[K].speedup.value:.2g}x")]
if is_real:
    measured = [f"{side.ms_per_token.median:.2f}" for side in (result.autoregressive, result.speculative)]
    rows.append((f"measured on {device.device_kind}", *measured, tables.quartiles(result.speedup, "x")))
header = ("", "alone", "with the draft", "speedup")
report.show([report.Table(title=f"ms per token at K = {K}, {told}", header=header, rows=rows)], console)
if not is_real:
    print("Nothing was measured that this could be compared with: on a TPU or a GPU a second line stands here.")
elif "v5" not in device.device_kind.lower():
    print("Forecast and measurement are of different chips: set CHIP, or compare ratios only.")
folder.cleanup()
