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
# # A trained pair: measure it, understand it, plan with it
#
# The package comes with a target that writes Python and a draft distilled from it. Here they write in colour, on this
# device; then: how much is accepted, on which kind of text, and which draft length K pays.

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
import ast
import functools
import html
import io
import json
import operator
import pathlib
import sysconfig
import tokenize

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console

from specsamp import Method, ModelDrafter, NoDrafter, chain, generate, load_pair, temperature, top_p
from specsamp.analysis import report, tables
from specsamp.analysis.acceptance import Interval, Profile
from specsamp.analysis.costs import CostTable, PerCall, clock_error
from specsamp.analysis.figures import BLUE, GREEN, GREY, TARGET, WRITERS, WRONG, set_style, tint
from specsamp.analysis.planner import make_plan
from specsamp.analysis.workload import Quartiles, Workload, decoders, take_turns
from specsamp.checkpoints.trained_pair import load_prompts, pair_folder
from specsamp.decoding.text import Continuation, TextStream
from specsamp.sampling.warp import log_probs

device, console = jax.devices()[0], Console(width=110)
print(f"{jax.device_count()} x {device.device_kind} ({device.platform}), JAX {jax.__version__}")
if device.platform != "cpu":
    print("The pair is small: an accelerator mostly waits between its steps. Acceptance is the same everywhere.")

set_style()

# %%
pair, prompts = load_pair("python"), load_prompts("python")


def at_temperature(t):
    return chain(temperature(t), top_p(0.95))  # of target and draft; 0.0 is greedy


for side, model in (("target", pair.target), ("draft", pair.draft)):
    print(f"{side}: {model.num_parameters:,} parameters, {model.config.num_layers} layers")
print(f"{pair.tokenizer.vocab_size} tokens in the vocabulary, {len(prompts)} held-out prompts")

# %% [markdown]
# ## Who wrote which token
#
# Green was drafted and accepted. The target itself wrote what is blue, the correction of a token that it rejected, and what
# is yellow, the bonus after a draft that was kept whole. (Without a notebook, ⟦brackets⟧ stand around the target's own.)


# %%
class Pieces:
    """Pieces of text, each with a CSS style, and whether it is marked where there are no colours."""

    def __init__(self, pieces):
        self.pieces = list(pieces)

    def _repr_html_(self):
        spans = (f'<span style="{style}">{html.escape(text)}</span>' for text, style, _ in self.pieces)
        return f'<pre style="line-height: 1.45">{"".join(spans)}</pre>'

    def __repr__(self):
        return "".join(f"⟦{text}⟧" if marked else text for text, _, marked in self.pieces)


def by_writer(prompt: str, completion) -> Pieces:
    stream, pieces, accepted = TextStream(Continuation(pair.tokenizer)), [(prompt, f"color: {GREY}", False)], 0
    for i, drafted in enumerate(completion.from_draft):
        if completion.tokens[i] == pair.tokenizer.eos_id:
            break
        text = stream.push(completion.tokens[: i + 1], finished=i + 1 == len(completion.tokens))
        writer = "accepted" if drafted else "bonus" if accepted == K else "correction"
        accepted = accepted + 1 if drafted else 0
        pieces.append((text, f"background: {tint(WRITERS[writer])}; color: black", not drafted))
    return Pieces(pieces)


K, TOKENS = 4, 48
asked = ["def fibonacci(n):", *prompts]  # one batch
sampled = generate(pair, asked, TOKENS, sampling=at_temperature(0.8), draft_length=K, seed=3)
stats = sampled[0].stats
print(f"{stats.emitted} tokens in {stats.rounds} rounds: {stats.emitted_per_round:.2f} per call of the target")
by_writer(asked[0], sampled[0])

# %% [markdown]
# ## Acceptance
#
# The **acceptance rate** counts accepted tokens over *verified* ones; the tokens **emitted per round** are another
# number, 1 to K + 1. Whether a drafted token is kept is one coin flip given the text so far, so errors are binomial.
# Numbers of a distribution are data: greedy decoding runs the program that is already compiled.

# %%
greedy = generate(pair, asked, TOKENS, sampling=at_temperature(0.0), draft_length=K, seed=3)
rows = []
for name, done in (("temperature 0.8", sampled), ("greedy", greedy)):
    counts = functools.reduce(operator.add, (row.stats for row in done))
    by_position = ", ".join(f"{rate:.2f}" for rate in counts.acceptance_by_position)
    rows.append((name, tables.rate_with_error(counts), by_position, f"{counts.emitted_per_round:.2f}"))
header = (f"K = {K}", "accepted, of verified", "by position", "emitted per round")
title = f"{len(asked)} prompts, {TOKENS} tokens each"
report.print_tables([report.Table(title=title, header=header, rows=rows)], console)

# %% [markdown]
# ## What is easy to draft?
#
# On source that neither model has read, the chance that a draft is kept is known before any is drawn: it is
# $\sum_x \min(p(x), q(x))$ at every position, given the *true* text before it (here with both distributions at temperature 0.8
# and top-p 0.95). The kinds: code, comments, and the prose of documentation strings.

# %%
KINDS, LENGTH, SKIPPED, WINDOWS = ("code", "comment", "docstring"), 256, 32, 16


def kinds_of(source: str) -> np.ndarray:
    """Returns the kind of every character, [len(source)]."""
    starts = np.cumsum([0, *(len(line) + 1 for line in source.split("\n"))])
    kinds = np.zeros(len(source), int)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            kinds[starts[token.start[0] - 1] + token.start[1] :][: len(token.string)] = 1
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            text = node.body[0].value
            kinds[starts[text.lineno - 1] + text.col_offset : starts[text.end_lineno - 1] + text.end_col_offset] = 2
    return kinds


def windows_of(source: str) -> np.ndarray:
    """Tokens and the kind of each (of its last character), [windows, 2, LENGTH + 1]."""
    tokens = pair.tokenizer.encode(source)
    ends = np.cumsum([len(pair.tokenizer.decode([token])) for token in tokens])
    both = np.stack([tokens, kinds_of(source)[ends - 1]])
    count = (len(tokens) - 1) // LENGTH
    return np.array([both[:, n * LENGTH :][:, : LENGTH + 1] for n in range(count)]).reshape(-1, 2, LENGTH + 1)


held_out = json.loads((pair_folder("python") / "prompts.json").read_text())["prompts"]
files = sorted({pathlib.Path(sysconfig.get_path("stdlib")) / entry["file"] for entry in held_out})
sources = [path.read_text(encoding="utf-8") for path in files if path.is_file()]  # versions of Python differ
windows = np.concatenate([windows_of(source) for source in sources if source.isascii()])
windows = windows[np.unique(np.linspace(0, len(windows) - 1, WINDOWS).astype(int))]
print(f"{len(windows)} windows of {LENGTH} tokens from {len(sources)} held-out files; the first {SKIPPED} are context")


# %%
@jax.jit
def kept_chance(target_params, draft_params, tokens_BT):
    """Returns the chance that a draft of the next token is kept, [B, T]."""
    probs = [
        jnp.exp(log_probs(at_temperature(0.8), model.forward(params, tokens_BT).logits_BTV))
        for model, params in ((pair.target, target_params), (pair.draft, draft_params))
    ]
    return jnp.minimum(*probs).sum(-1)


tokens, next_kinds = jnp.asarray(windows[:, 0, :-1], jnp.int32), windows[:, 1, 1:]
parts = [tokens[i : i + 8] for i in range(0, len(tokens), 8)]
kept = np.concatenate([kept_chance(pair.target_params, pair.draft_params, part) for part in parts])
counted = np.arange(LENGTH) >= SKIPPED


def mean_and_error(kind: int) -> tuple[float, float, int]:
    """Returns the mean chance at tokens of a kind, its error, and their number; windows, not tokens, are taken as independent."""
    of_kind = (next_kinds == kind) & counted
    totals, numbers = (kept * of_kind).sum(1), of_kind.sum(1)
    mean = totals.sum() / numbers.sum()
    return float(mean), float(np.sqrt(((totals - mean * numbers) ** 2).sum()) / numbers.sum()), int(numbers.sum())


accepted = {name: mean_and_error(kind) for kind, name in enumerate(KINDS)}
figure, axis = plt.subplots(figsize=(6.4, 2.2))
for name in KINDS:
    mean, error, number = accepted[name]
    axis.barh(name, mean, 0.6, xerr=error, color=tint(BLUE), ecolor="black", capsize=3)
    axis.text(0.01, name, f"{mean:.3f} ± {error:.3f}   ({number:,} tokens)", va="center")
easiest, hardest = (choose(KINDS, key=lambda name: accepted[name][0]) for choose in (max, min))
axis.set(title=f"Easiest to draft: {easiest}; hardest: {hardest}", xlim=(0, 1))
axis.set(xlabel="chance that a drafted token is kept (± standard error)")
axis.invert_yaxis()
plt.show()

# %% [markdown]
# Token by token: the paler the green, the less likely the draft is kept. Endings of words and of constructions are
# easy; what is hard is where something new begins.

# %%
shown = int(np.argmin(np.abs((next_kinds == 2).mean(1) - 0.4)))  # a window of code and prose
Pieces(
    (pair.tokenizer.decode([int(token)]), f"background: {tint(GREEN, chance)}; color: black", chance < 0.5)
    for token, chance in zip(windows[shown, 0, 1 + SKIPPED :], kept[shown, SKIPPED:])
)

# %% [markdown]
# ## Which K pays?
#
# A longer draft emits more tokens per round and makes the round longer. The planner takes the acceptance and the time
# of rounds at K = 0, 1 and 4 on four prompts, and forecasts all K; four other prompts are decoded with each K, in turn.

# %%
CHECKED, FITTED, NEW_TOKENS, PASSES = (0, 1, 2, 4), (0, 1, 4), 24, 3
told = [tuple(pair.tokenizer.encode(prompt)) for prompt in prompts[:8]]
sides = {}
for half, texts in (("fit", told[0::2]), ("check", told[1::2])):
    work = Workload(
        prompt_length=max(map(len, told)),
        max_new_tokens=NEW_TOKENS,
        repeats=PASSES * len(texts),
        prompts=tuple(texts),
    )
    plain = Method(drafter=NoDrafter(), sampling=at_temperature(0.8))
    drafters = {k: ModelDrafter(pair.draft, k) if k else NoDrafter() for k in CHECKED}
    sides |= decoders(pair, {(half, k): plain.with_drafter(drafter) for k, drafter in drafters.items()}, work)
for side in sides.values():
    side.decode(0)  # compiles
timings = take_turns({name: side.decode for name, side in sides.items()}, work.repeats)


def ms_per_token(half: str, k: int) -> np.ndarray:
    """Milliseconds per token of each prompt, [4], the mean of the passes."""
    ms = np.array([timing.loop_seconds for timing in timings[half, k]]) / NEW_TOKENS * 1e3
    return ms.reshape(PASSES, -1).mean(0)


def fitted_round_ms(k: int) -> Quartiles:
    return Quartiles.of([timing.loop_seconds / timing.rounds * 1e3 for timing in timings["fit", k]])


def fitted_profile(k: int) -> Profile:
    done = timings["fit", k]
    step = len(texts)  # a prompt comes again after so many
    return Profile.of_texts([sum((one.stats for one in done[i + step :: step]), done[i].stats) for i in range(step)])


plan = make_plan(
    {k: fitted_profile(k) for k in FITTED if k},
    CostTable(
        {1: {k: fitted_round_ms(k).median for k in FITTED}},
        error=clock_error(fitted_round_ms(k).relative_error(work.repeats) for k in FITTED),
    ),
    draft_lengths=CHECKED,
    new_tokens=NEW_TOKENS,
)
# Four prompts were fitted to and four others are checked on: both halves have this error.
forecast = {
    k: Interval.around(plan[k].ms_per_token.value, np.sqrt(2) * plan[k].ms_per_token.relative_error) for k in CHECKED
}
measured = {k: ms_per_token("check", k) for k in CHECKED}
rows = [
    (
        f"K = {k}",
        tables.interval(forecast[k]),
        f"{measured[k].mean():.3g} ± {measured[k].std(ddof=1) / np.sqrt(len(texts)):.2g}",
        f"{measured[0].mean() / measured[k].mean():.2f}x",
    )
    for k in CHECKED
]
header = ("", "forecast (band)", "measured ± standard error", "speedup")
report.print_tables([report.Table(title="ms per token, batch 1", header=header, rows=rows)], console)
best = min(measured, key=lambda k: measured[k].mean())
inside = [forecast[k].lower <= measured[k].mean() <= forecast[k].upper for k in CHECKED]
print(f"forecast: K = {plan.best.draft_length} is best; measured: K = {best}")
print(f"{sum(inside)} of {len(inside)} measured points are within the band")

# %% [markdown]
# The band is what the choice of prompts and the clock leave open: how much tokens per round vary over the four fitted
# prompts and how much the time of a round varies, and both once more for the four prompts that are checked. Its formula is
# that of a 95% band, but it has no such name here: four prompts say too little about how much prompts vary, and on a busy
# machine all points move together. With 160 prompts the same planner's bands hold 95% of the measured points, and its best
# K costs next to nothing (notebooks/results/archive.md#do-forecasts-hold).

# %%
figure, axis = plt.subplots(figsize=(6.4, 3))
axis.plot(CHECKED, [forecast[k].value for k in CHECKED], color=TARGET, label="forecast, from the other prompts")
low, high = zip(*((forecast[k].lower, forecast[k].upper) for k in CHECKED))
axis.fill_between(CHECKED, low, high, color=TARGET, alpha=0.15, linewidth=0, label="band: prompts and clock")
errors = [measured[k].std(ddof=1) / np.sqrt(len(texts)) for k in CHECKED]
means = [measured[k].mean() for k in CHECKED]
axis.errorbar(CHECKED, means, errors, fmt="o", color=WRONG, capsize=3, label="measured ± standard error")
axis.axhline(means[0], color=GREY, linewidth=0.8, linestyle="--", label="plain decoding, measured")
axis.set(title=f"Forecast to be fastest: K = {plan.best.draft_length}; measured: K = {best} ({device.device_kind})")
axis.set(xlabel="K, drafted per round", ylabel="ms per token, batch 1", xticks=CHECKED, ylim=(0, None))
axis.legend()
plt.show()

# %% [markdown]
# The same planner, with a rate in place of a measurement: if a call of the draft costs a tenth of the target's, as it
# may where weights are streamed (on TPU v4 the paper's pair is at 0.13), what would each kind of text gain?

# %%
costs, rows = PerCall(target_ms=1.0, draft_ms=0.1), []
for name in KINDS:
    best = make_plan(Profile.of_rate(accepted[name][0]), costs).best
    rows.append((name, tables.with_error(*accepted[name][:2]), str(best.draft_length), f"{best.speedup.value:.2f}x"))
report.print_tables(
    [
        report.Table(
            title="If a draft call costs a tenth",
            header=("", "acceptance", "best K", "speedup"),
            rows=rows,
        )
    ],
    console,
)
