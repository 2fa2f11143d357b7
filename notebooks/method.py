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
# # Speculative sampling, on models small enough to check
#
# A **draft** proposes K tokens, one call of the **target** scores them all, and a rule keeps as many as it can and
# corrects the first that it cannot. What comes out follows the target's distribution exactly
# ([Chen et al. 2023](https://arxiv.org/abs/2302.01318)). Here both models are tables of five tokens, so *exactly* can
# be looked at: first the rule, why whole texts are exact, and that they are; then how many tokens a round emits and how
# many to draft; last a better rule, and three others, two of them wrong.

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
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from specsamp import BlockRule, CoupledRule, Draft, LanguageModel, Output, Pair, TokenRule, chain, generate
from specsamp.analysis.figures import COLOURS, DRAFT, GREY, KEPT, STYLES, TARGET, WRONG, set_style
from specsamp.sampling.rng import Purpose, RoundKeys, row_keys
from specsamp.sampling.rules import TargetDistributions

device = jax.devices()[0]
print(f"{jax.device_count()} x {device.device_kind} ({device.platform}), JAX {jax.__version__}")
print("The models of this notebook are tables: any device will do.")

set_style()

# %% [markdown]
# ## Two models
#
# A model is anything that turns tokens into logits. This one looks them up by the last token. The draft is the target
# with noise on it: right about much, wrong about some.

# %%
V, K = 5, 3  # tokens of the vocabulary, tokens drafted per round


@dataclasses.dataclass(frozen=True)
class Bigram(LanguageModel):
    vocab_size: int = V

    def prepare(self, params):
        return jax.nn.log_softmax(params)

    def init_cache(self, batch, slots):  # it remembers nothing
        return jnp.zeros((batch, 0))

    def __call__(self, weights, tokens_BT, start_B, cache, *, hidden_layers=()):
        return Output(logits_BTV=weights[tokens_BT], cache=cache)


random = np.random.default_rng(0)
target_logits = 1.3 * random.normal(size=(V, V))
draft_logits = target_logits + 1.5 * random.normal(size=(V, V))
pair = Pair(
    target=Bigram(),
    target_params=jnp.asarray(target_logits, jnp.float32),
    draft=Bigram(),
    draft_params=jnp.asarray(draft_logits, jnp.float32),
)
target_VV, draft_VV = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (target_logits, draft_logits))

# %% [markdown]
# ## Accept, residual, bonus
#
# With $q$ the target's distribution and $p$ the draft's (the paper's letters), a drafted token $x \sim p$ is kept with
# probability
#
# $$\min\left(1, \frac{q(x)}{p(x)}\right), \quad\text{else another is drawn from}\quad
# \frac{(q(x) - p(x))_+}{\sum_z (q(z) - p(z))_+}.$$
#
# Token $x$ then comes out with probability $p(x)\min(1, q(x)/p(x)) + (q(x) - p(x))_+ = \min(p, q) + (q - p)_+ = q(x)$,
# because the chance of a rejection is just the mass of the residual. The share that is kept is
# $\sum_x \min(p, q) = 1 - \mathrm{TV}(p, q)$.

# %%
LAST = 0
target_V, draft_V = target_VV[LAST], draft_VV[LAST]
kept_V, residual_V = np.minimum(target_V, draft_V), np.maximum(target_V - draft_V, 0)

figure, axis = plt.subplots(figsize=(8, 3))
axis.bar(range(V), kept_V, 0.62, color=KEPT, label=f"kept: min(p, q), {kept_V.sum():.0%} of the drafts")
axis.bar(range(V), residual_V, 0.62, bottom=kept_V, color=TARGET, label="residual: (q - p)+")
axis.bar(range(V), draft_V, 0.8, fill=False, edgecolor=DRAFT, linewidth=1.8, label="the draft's distribution p")
axis.set(title=f"What is kept and the residual add up to the target (after token {LAST})")
axis.set(xlabel="next token", ylabel="probability")
axis.legend(loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## One round by hand
#
# Draft K tokens, score them, judge them from left to right. The first refused token is replaced by one of the residual
# and ends the round; where all are kept the scores already hold one token more, the **bonus**. So a round emits 1 to
# K + 1 tokens for one call of the target.


# %%
def one_round(last: int, random: np.random.Generator) -> list[int]:
    """Returns what follows token ``last``."""
    drafted = []
    for _ in range(K):
        drafted.append(int(random.choice(V, p=draft_VV[drafted[-1] if drafted else last])))
    before = [last, *drafted]  # one call of the target would give the distributions after all of these
    emitted = []
    for i, token in enumerate(drafted):
        target_V, draft_V = target_VV[before[i]], draft_VV[before[i]]
        chance, uniform = min(1, target_V[token] / draft_V[token]), random.random()
        print(f"  drafted {token}: q = {target_V[token]:.2f}, p = {draft_V[token]:.2f}", end=", ")
        print(f"kept with {chance:.2f}", end="; ")
        if uniform >= chance:
            residual_V = np.maximum(target_V - draft_V, 0)
            correction = int(random.choice(V, p=residual_V / residual_V.sum()))
            print(f"{uniform:.2f} refuses it, the residual gives {correction}")
            return [*emitted, correction]
        print(f"{uniform:.2f} keeps it")
        emitted.append(token)
    bonus = int(random.choice(V, p=target_VV[before[-1]]))
    print(f"  all {K} kept, and the bonus: {bonus}")
    return [*emitted, bonus]


random, text = np.random.default_rng(23), [LAST]
for number in range(3):
    print(f"round {number + 1}, after {text}")
    text += one_round(text[-1], random)
text

# %% [markdown]
# ## Why whole texts are exact
#
# One token is not enough: a round drafts several before it knows which of them stand, and how many stand depends on the
# very tokens that are judged. Write $q(\cdot \mid y)$ and $p(\cdot \mid y)$ for the distributions of target and draft
# after a text $y$, as they are sampled, so after temperature and top-p.
#
# **Theorem.** The text $Y_1 Y_2 \ldots$ that rounds write, of whatever lengths K, is one of the target's: for every $n$
# and every $y_1 \ldots y_n$
#
# $$P(Y_1 = y_1, \ldots, Y_n = y_n) = \prod_{i=1}^{n} q(y_i \mid y_1 \ldots y_{i-1}).$$
#
# **Lemma (one token).** Let $y$ be a text, $x \sim p(\cdot \mid y)$, and judge $x$ as above with random numbers that are
# independent of all before. What comes out, $x$ or its correction, has the distribution $q(\cdot \mid y)$. That is the
# line of algebra above. (If $p = q$, nothing is ever rejected, and the residual, which has no mass, is never asked for.)
#
# **Drafting late changes nothing.** A round draws $x_1, \ldots, x_K$ in advance, but $x_i$ is looked at only if
# $x_1, \ldots, x_{i-1}$ were all kept. Then the text before it is the one it was drafted after, so $x_i$ was drawn from
# $p(\cdot \mid \text{the text so far})$; and if they were not all kept, $x_i$ is thrown away unseen, and the random
# numbers that drew it are not used again. The text is therefore distributed as if $x_i$ were drawn only when its turn has
# come, with fresh random numbers. Let the rounds do that.
#
# **Induction over positions.** Suppose that $n$ tokens are written and that the claim holds for them; for $n = 0$ there is
# nothing to show. Let $H_n$ be *everything* that has happened so far: the tokens, but also where rounds began, what was
# rejected, and how many tokens this round may still draft. $H_n$ decides which of two things happens next:
#
# * the round has drafted tokens left: one is drawn and judged, and by the lemma $Y_{n+1} \sim q(\cdot \mid Y_1 \ldots Y_n)$;
# * all K were kept: the bonus is drawn, $Y_{n+1} \sim q(\cdot \mid Y_1 \ldots Y_n)$ by definition.
#
# Either way $P(Y_{n+1} = y \mid H_n) = q(y \mid Y_1 \ldots Y_n)$, which depends on $H_n$ through the text alone. So, taking
# the mean over all histories of the same text,
#
# $$P(Y_{n+1} = y \mid Y_1 \ldots Y_n)
# = E\left[\,P(Y_{n+1} = y \mid H_n) \,\middle|\, Y_1 \ldots Y_n\right] = q(y \mid Y_1 \ldots Y_n),$$
#
# and multiplying by the claim for $n$ gives it for $n + 1$. $\blacksquare$
#
# **What is conditioned on** is the past, never the outcome. Given that a drafted token *was kept* it follows
# $\min(p, q) / \sum \min(p, q)$, the green bars and not the target. So a rejection must be followed by its correction:
# a round that is drawn again until something is kept, or that drops its correction, is biased. For the same reason
# K may depend on the text, on confidence in earlier tokens, on anything in $H_n$, but whether $x_i$ is submitted must not
# depend on $x_i$ or on what follows it. An end-of-text token or a budget is harmless: it cuts a text whose distribution is right.
#
# **The bonus** is the last row of scores, those after $x_K$, which no draft has touched. There nothing is to be subtracted:
# the same formula with $p = 0$. A round that stopped without it would be exact as well, as the next round would
# write that position. But it would have computed the row for nothing, would emit $a^K$ tokens fewer (below), and none
# at all for K = 0; with it every call of the target writes at least one token, and plain decoding is the loop with an empty
# draft. What would *not* be exact is to draw from $q$ after a rejection, too (unless less is kept: last section). Tokens that
# the draft overrates are rejected, so what is missing then is what it underrates: the residual.
#
# The block rule, below, keeps or drops several tokens by one decision, so its proof goes round by round instead:
# it is in the paper that is named there.

# %% [markdown]
# ## Is it exact?
#
# `generate` does the same on the device, for all rows at once. The joint distribution of the first two tokens can be written
# down, so draw many texts and compare. The yardstick:
#
# * how far apart: total variation, $\mathrm{TV} = \tfrac12 \sum_x |\hat\pi(x) - \pi(x)|$;
# * how far chance alone takes N samples of the right distribution: on average at most
#   $\tfrac12 \sum_x \sqrt{\pi(x)(1 - \pi(x)) / N}$, and beyond that plus $\sqrt{\ln(10^6) / 2N}$ less than once in a
#   million (McDiarmid's inequality: one sample moves TV by at most 1/N).

# %%
SAMPLES = 20_000


def joint_distribution(next_VV: np.ndarray) -> np.ndarray:
    """Returns the distribution of the two tokens after `LAST`, [V * V]."""
    return (next_VV[LAST][:, None] * next_VV).ravel()


def draw_many(rule, **options):
    """Shares of each pair of tokens, [V * V], and the acceptance rate."""
    done = generate(pair, [[LAST]], 2, sampling=chain(), rule=rule, num_samples=SAMPLES, seed=1, **options)
    pairs = [V * row.tokens[0] + row.tokens[1] for row in done]
    judged = sum(sum(row.stats.reached) for row in done)
    accepted = sum(row.stats.accepted for row in done)
    return np.bincount(pairs, minlength=V * V) / SAMPLES, accepted / judged if judged else float("nan")


def total_variation(one: np.ndarray, other: np.ndarray) -> float:
    return 0.5 * float(np.abs(one - other).sum())


def by_chance(distribution: np.ndarray) -> float:
    """Returns the distance that samples of ``distribution`` itself exceed less than once in a million."""
    return 0.5 * float(np.sqrt(distribution * (1 - distribution) / SAMPLES).sum()) + float(
        np.sqrt(np.log(1e6) / (2 * SAMPLES))
    )


distribution, draft_distribution = joint_distribution(target_VV), joint_distribution(draft_VV)
chance = by_chance(distribution)
exact = {
    "no draft, K = 0": draw_many(TokenRule(), draft_length=0),
    "token rule": draw_many(TokenRule(), draft_length=K),
    "block rule": draw_many(BlockRule(), draft_length=K),
    "coupled rule": draw_many(CoupledRule(), draft_length=K),
}


def show_distances(drawn: dict) -> None:
    print(f"{'':22}{'TV to the target':>18}{'by chance below':>18}{'accepted':>10}")
    for name, (shares, accepted) in drawn.items():
        rate = "" if np.isnan(accepted) else f"{accepted:.1%}"
        print(f"{name:22}{total_variation(shares, distribution):18.4f}{chance:18.4f}{rate:>10}")


show_distances(exact)
print(f"\nthe draft's own distribution is {total_variation(draft_distribution, distribution):.4f} away")
assert all(total_variation(shares, distribution) < chance for shares, _ in exact.values())


# %%
def show_histogram(axis, shares: np.ndarray, colour: str, title: str) -> None:
    """Draws shares as bars, the target's distribution as steps, the draft's as dots."""
    axis.bar(range(V * V), shares, 0.8, color=colour, alpha=0.55, label=f"{SAMPLES:,} texts")
    edges = np.arange(V * V + 1) - 0.5
    axis.step(
        edges, [*distribution, distribution[-1]], where="post", color=TARGET, linewidth=1.4, label="target, exactly"
    )
    axis.plot(
        range(V * V),
        draft_distribution,
        "D",
        color=DRAFT,
        markersize=4,
        markeredgecolor="black",
        markeredgewidth=0.6,
        label="draft, exactly",
    )
    axis.set(title=f"{title} (TV = {total_variation(shares, distribution):.3f})", ylabel="probability")
    axis.set_xticks(range(V // 2, V * V, V), [f"{first}, then 0 to {V - 1}" for first in range(V)])


figure, axis = plt.subplots(figsize=(8, 3))
show_histogram(axis, exact["token rule"][0], KEPT, "The token rule's texts follow the target, not the draft")
axis.set_xlabel("first two tokens")
axis.legend()
plt.show()

# %% [markdown]
# ## How many tokens does a round emit?
#
# Suppose that each drafted token is kept with the same chance $a$, whatever came before. At least $i$ of them are kept with
# probability $a^i$, so the mean number is $a + a^2 + \ldots + a^K$, and with the target's own token
#
# $$E(K) = \sum_{i=0}^{K} a^i = \frac{1 - a^{K+1}}{1 - a}$$
#
# ([Leviathan et al. 2022](https://arxiv.org/abs/2211.17192), equation 1): at most $1 / (1 - a)$, however long the draft. Beside
# it the token rule itself, on two distributions of which it keeps the share $a$: they exchange the probabilities $a/2$ and
# $1 - a/2$ of two tokens. It judges from left to right, so one simulation with the longest draft tells all shorter ones.

# %%
CHANCES, LONGEST, ROUNDS = (0.5, 0.7, 0.9), 16, 40_000


def expected(a: float, lengths) -> np.ndarray:
    """Returns the tokens per round at each K: the formula."""
    return (1 - a ** (np.asarray(lengths) + 1)) / (1 - a)


@jax.jit
def kept_per_round(a):
    """Draws rounds of `LONGEST` tokens, and returns how many the token rule keeps in each, [ROUNDS]."""
    rule, rows = TokenRule(), jnp.arange(ROUNDS)
    keys = RoundKeys(rows_B=row_keys(5, rows, jnp.zeros_like(rows)), starts_B=jnp.zeros_like(rows))
    target_V, draft_V = jnp.log(jnp.array([[a / 2, 1 - a / 2], [1 - a / 2, a / 2]]))
    each_BV = jnp.broadcast_to(draft_V, (ROUNDS, 2))
    drafted_BK = jnp.stack([rule.sample(each_BV, keys, i) for i in range(LONGEST)], axis=1)
    draft_BKV = jnp.broadcast_to(draft_V, (ROUNDS, LONGEST, 2))
    draft = Draft(tokens_BK=drafted_BK, num_drafted_B=jnp.full(ROUNDS, LONGEST), log_probs_BRV=draft_BKV)
    logits_BTV = jnp.broadcast_to(target_V, (ROUNDS, LONGEST + 1, 2))
    return rule.verify(
        draft, TargetDistributions(logits_BTV=logits_BTV, warp=chain(), draft=draft), keys
    ).num_accepted_B


lengths = np.arange(LONGEST + 1)
simulated = {}
for a in CHANCES:
    emitted = 1 + np.minimum(np.asarray(kept_per_round(a))[:, None], lengths)  # with each K, [ROUNDS, LONGEST + 1]
    simulated[a] = emitted.mean(0)
    errors = np.maximum(emitted.std(0) / np.sqrt(ROUNDS), 1e-6)
    assert (np.abs(simulated[a] - expected(a, lengths)) < 5 * errors).all()

figure, axis = plt.subplots(figsize=(6.4, 3.2))
for a, colour, style in zip(CHANCES, COLOURS, STYLES):
    axis.plot(lengths, expected(a, lengths), style, color=colour)
    axis.plot(lengths, simulated[a], "o", color=colour, markersize=4)
    axis.text(LONGEST + 0.3, expected(a, LONGEST), f"a = {a}", color=colour, va="center")
axis.plot([], [], "k-", label=r"$(1 - a^{K+1})\,/\,(1 - a)$")
axis.plot([], [], "ko", markersize=4, label=f"the token rule, {ROUNDS:,} rounds")
axis.set(
    title="A longer draft emits more tokens per round, but never more than 1 / (1 - a)",
    xlabel="K, drafted per round",
    ylabel="tokens per round",
)
axis.set(xlim=(0, LONGEST + 2), ylim=(0, None))
axis.legend()
plt.show()

# %% [markdown]
# ## How many tokens to draft?
#
# Let a call of the draft cost $c$ calls of the target, and let scoring K + 1 tokens cost what one costs, as it does where
# weights are streamed. A round then takes $1 + cK$, and drafting K tokens is faster by
#
# $$S(K) = \frac{1 - a^{K+1}}{(1 - a)(1 + cK)}$$
#
# (their theorem 3.8). One more token pays as long as what it adds, $a^{K+1}$, is more than $c$ times the speedup so far:
# $E(K) + a^{K+1}$ over $1 + cK + c$ exceeds $S(K)$ just if $a^{K+1} > c\,S(K)$.

# %%
COST = 0.13  # the paper's pair on TPU v4: 1.8 ms of 14.1 ms

figure, axis = plt.subplots(figsize=(6.4, 3.2))
for a, colour, style in zip(CHANCES, COLOURS, STYLES):
    by_formula, by_rule = (values / (1 + COST * lengths) for values in (expected(a, lengths), simulated[a]))
    best, best_simulated = int(by_formula.argmax()), int(by_rule.argmax())
    print(
        f"a = {a}: best K = {best}, {by_formula[best]:.2f}x; simulated: K = {best_simulated}, {by_rule[best_simulated]:.2f}x"
    )
    assert by_formula[best_simulated] > 0.99 * by_formula[best]
    axis.plot(lengths, by_formula, style, color=colour)
    axis.plot(best, by_formula[best], "o", color=colour, markersize=9, fillstyle="none")
    axis.plot(best_simulated, by_rule[best_simulated], "x", color=colour, markersize=6)
    axis.text(LONGEST + 0.3, by_formula[-1], f"a = {a}", color=colour, va="center")
axis.plot([], [], "ko", markersize=9, fillstyle="none", label="best K by the formula")
axis.plot([], [], "kx", markersize=6, label="best K of the simulation")
axis.axhline(1, color=GREY, linewidth=0.8)
axis.set(title=f"The more is kept, the longer a draft pays (a draft call costs c = {COST})")
axis.set(xlabel="K, drafted per round", ylabel="speedup over plain decoding (x)", xlim=(0, LONGEST + 2), ylim=(0, None))
axis.legend(loc="lower left")
plt.show()

# %% [markdown]
# ## Judge the block, not the token
#
# The token rule stops at the first refusal, however good the rest is. Block verification
# ([Sun et al. 2024](https://arxiv.org/abs/2403.10444)) carries the surplus along: with $c_0 = 1$ and
# $c_i = \min(1, c_{i-1}\, q_i(x_i)/p_i(x_i))$ it keeps *at least i* tokens with probability $c_i$, where the token rule
# keeps them with $\prod_{j \le i} \min(1, q_j/p_j) \le c_i$. It is exact as well (above), never keeps fewer tokens in
# expectation, and is the token rule for K = 1. The example of the paper, by enumeration:

# %%
mirrored = np.log([[1 / 3, 2 / 3], [2 / 3, 1 / 3]])  # the target's distribution of two tokens, and the draft's
drafts_BK = np.stack(np.meshgrid([0, 1], [0, 1], indexing="ij"), -1).reshape(-1, 2)  # all drafts of K = 2
log_probs = jnp.asarray(np.broadcast_to(mirrored[:, None, None], (2, 4, 3, 2)), jnp.float32)
drafts = Draft(tokens_BK=jnp.asarray(drafts_BK), num_drafted_B=jnp.full(4, 2), log_probs_BRV=log_probs[1, :, :2])
weight_B = np.exp(mirrored[1][drafts_BK].sum(1))
by_token = weight_B @ np.cumprod(TokenRule().acceptance(drafts, log_probs[0]), axis=1).sum(1)
by_block = weight_B @ np.exp(BlockRule().prefix_weights(drafts, log_probs[0])[:, 1:]).sum(1)
print(f"accepted per round at K = 2: token rule {by_token:.4f} = 10/9, block rule {by_block:.4f} = 11/9")

# %% [markdown]
# And on our pair, whose draft is of the ordinary kind: tokens per round over the draft length, measured. Its acceptance
# varies from token to token; the formula, with the rate that the token rule has at K = 1, comes close all the same.

# %%
LENGTHS, TEXTS, TOKENS = (1, 2, 4, 8), 128, 96


def emitted_per_round(rule, draft_length: int) -> tuple[float, float]:
    """Returns the mean over texts, and its standard error."""
    done = generate(
        pair, [[LAST]], TOKENS, sampling=chain(), rule=rule, draft_length=draft_length, num_samples=TEXTS, seed=2
    )
    rates = [row.stats.emitted_per_round for row in done]
    return float(np.mean(rates)), float(np.std(rates, ddof=1) / np.sqrt(TEXTS))


figure, axis = plt.subplots(figsize=(6.4, 3))
for name, rule, colour, style in (("block rule", BlockRule(), KEPT, "-"), ("token rule", TokenRule(), TARGET, "--")):
    means, errors = np.transpose([emitted_per_round(rule, length) for length in LENGTHS])
    look = {"color": colour, "linestyle": style, "marker": "o", "markersize": 4, "capsize": 3}
    axis.errorbar(LENGTHS, means, errors, **look, label=f"{name}, {TEXTS} texts of {TOKENS} tokens ± standard error")
    print(f"{name}: " + ", ".join(f"K = {k}: {m:.2f} ± {e:.2f}" for k, m, e in zip(LENGTHS, means, errors)))
rate = means[LENGTHS.index(1)] - 1  # of the token rule, which came last
axis.plot(LENGTHS, expected(rate, LENGTHS), ":", color=GREY, label=f"formula, a = {rate:.2f}")
axis.set(title="The longer the draft, the more the block rule gains over the token rule")
axis.set(xlabel="K, drafted per round", xticks=LENGTHS, ylabel="tokens per round", ylim=(0, None))
axis.legend()
plt.show()

# %% [markdown]
# ## Three other ways
#
# A rule is a small object: a chance to accept, a residual, a draw. So others are quickly written.
#
# 1. **Standard rejection sampling** accepts with $q(x) / (M p(x))$, $M = \max_z q(z)/p(z)$; what is refused leaves the
#    distribution $q$ to draw from. It is *exact*, but accepts only $1/M$ where the residual allows $1 - \mathrm{TV}(p, q)$.
# 2. **Accept always**: fast, and the distribution becomes the draft's (but for every bonus).
# 3. **Noise reused**: the residual is drawn with the random number that drew the refused token. Nothing fails, and the
#    distribution is neither the target's nor the draft's: that number is known to lie where the draft was refused.


# %%
class StandardRejection(TokenRule):
    def acceptance(self, draft, target_log_probs):
        log_ratios_BKV = target_log_probs[:, :-1] - draft.log_probs_BRV
        at_token_BK = jnp.take_along_axis(log_ratios_BKV, draft.tokens_BK[..., None], axis=-1)[..., 0]
        return jnp.where(draft.is_drafted_BK, jnp.exp(at_token_BK - log_ratios_BKV.max(-1)), 0)

    def residual(self, draft, target_log_probs, num_accepted_B):
        return jnp.exp(jnp.take_along_axis(target_log_probs, num_accepted_B[:, None, None], axis=1)[:, 0])


class AcceptAlways(TokenRule):
    exact = False

    def acceptance(self, draft, target_log_probs):
        return draft.is_drafted_BK.astype(jnp.float32)


class OneStream(RoundKeys):
    """Noise that does not know whether it drafts or corrects."""

    def uniforms(self, purpose, offsets_BT):
        return super().uniforms(Purpose.DRAFT if purpose == Purpose.RESIDUAL else purpose, offsets_BT)


class NoiseReused(TokenRule):
    exact = False

    def verify(self, draft, target, keys):
        return super().verify(draft, target, OneStream(rows_B=keys.rows_B, starts_B=keys.starts_B))


others = {
    "standard rejection": draw_many(StandardRejection(), draft_length=K),
    "accept always": draw_many(AcceptAlways(), draft_length=K),
    "noise reused": draw_many(NoiseReused(), draft_length=K),
}
show_distances({"token rule": exact["token rule"], **others})
distances = {name: total_variation(shares, distribution) for name, (shares, _) in others.items()}
assert distances["standard rejection"] < chance < min(distances["accept always"], distances["noise reused"])
assert total_variation(others["accept always"][0], draft_distribution) < by_chance(draft_distribution)

# %%
figure, axes = plt.subplots(3, 1, figsize=(8, 6.6), sharex=True)
for axis, (name, (shares, _)) in zip(axes, others.items()):
    show_histogram(axis, shares, KEPT if distances[name] < chance else WRONG, name.capitalize())
figure.suptitle("Standard rejection is exact, the other two are not", x=0.01, ha="left")
axes[0].legend()
axes[-1].set_xlabel("first two tokens")
plt.show()

# %% [markdown]
# That is how this repository tests itself: every rule is enumerated, the whole loop is drawn from against distributions that can
# be written down, and a table of such mutants shows that the tests would notice.
