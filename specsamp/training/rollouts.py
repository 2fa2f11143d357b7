"""Learns from rewards of whole texts, which are sampled speculatively: GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1).

    state = learn(pair, prompts, reward, RolloutConfig(policy=TrainConfig(steps=200, batch=32)), "runs/policy")

A policy step samples a group of texts for each of some prompts, turns their rewards into advantages within the group, and
makes one update. Parameters are arguments of the compiled programs: a step compiles nothing, and no parameter goes through
the host. All texts of a step have ended before the parameters change, since the caches of a row that went on would be
those of the old policy. Texts follow the policy whatever the draft proposes; a draft that stays as it was is accepted less
and less, a draft that learns from the texts follows (online speculative decoding, arXiv 2310.07177).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from specsamp import storage, validate
from specsamp.checkpoints.orbax import Checkpoints
from specsamp.decoding.engine import Engine
from specsamp.decoding.method import Decoding, make_method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt, make_requests
from specsamp.decoding.results import Completion
from specsamp.decoding.state import Weights
from specsamp.models.heads import DRAFT_IDS
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import chain, first_tokens, log_probs, temperature
from specsamp.serving.batch import Batch
from specsamp.serving.generate_many import TOGETHER, Queue
from specsamp.training.objective import cross_entropy
from specsamp.training.run_folder import MetricsLog, Progress, check_run
from specsamp.training.trainer import Intervals, TrainConfig, TrainState, check_finite, init_state, train_step
from specsamp.training.training_task import Task

Array = jax.Array
Reward = Callable[[Prompt, Completion], float]

SAME = 1e-6  # rewards of a group whose standard deviation is smaller teach nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Policy steps.

    Attributes:
      policy: the policy's optimizer; its ``batch`` is the number of texts of a step.
      draft: the draft's optimizer, which makes one update on the texts of each step; None: the draft stays as it was.
      group: texts of each prompt.
      max_new_tokens: the budget of a text.
      temperature: of the texts and of the policy that learns from them; above 0.
      rows: texts that are decoded together.
      clip: how far the ratio of new to old probabilities counts on either side of 1.
    """

    policy: TrainConfig
    draft: TrainConfig | None = None
    group: int = 8
    max_new_tokens: int = 64
    temperature: float = 1.0
    rows: int = 8
    clip: float = 0.2

    def __post_init__(self):
        for name, least in (("group", 2), ("max_new_tokens", 1), ("rows", 1)):
            validate.integer(name, getattr(self, name), least)
        for name in ("temperature", "clip"):
            validate.number(name, getattr(self, name), 0, above=True)
        if self.policy.batch % self.group:
            raise ValueError(f"policy.batch {self.policy.batch} is no multiple of group {self.group}")
        if self.draft is not None and self.draft.batch != self.policy.batch:
            raise ValueError(
                f"draft.batch {self.draft.batch} is not the policy's {self.policy.batch}: both read all texts"
            )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts of a step.

    Attributes:
      tokens_BT: int32 ``[B, T + 1]``, prompts and what follows, filled up on the right.
      log_probs_BT: float32 ``[B, T]``, of each token after the first when it was sampled.
      emitted_BT: bool, whether the policy wrote it.
      advantages_B: float32, how much better its reward is than its group's.
    """

    tokens_BT: Array
    log_probs_BT: Array
    emitted_BT: Array
    advantages_B: Array


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Task):
    """Makes texts with advantages likelier, and others less likely.

    Attributes:
      model: the policy.
      temperature, clip: see `RolloutConfig`.
      num_tokens: of the tokenizer; ids beyond are never written.
    """

    model: TransformerLM
    temperature: float
    clip: float
    num_tokens: int

    def loss(self, params, teacher_params, texts: Texts, key, step=0):
        logits_BTV = self.model.forward(params, texts.tokens_BT[:, :-1]).logits_BTV
        warp = chain(first_tokens(self.num_tokens), temperature(self.temperature))
        now_BT = -cross_entropy(log_probs(warp, logits_BTV), texts.tokens_BT[:, 1:])
        gap_BT = jnp.where(texts.emitted_BT, now_BT - texts.log_probs_BT, 0.0)
        ratio_BT, advantages_B1 = jnp.exp(gap_BT), texts.advantages_B[:, None]
        clipped_BT = jnp.clip(ratio_BT, 1 - self.clip, 1 + self.clip)
        gain_BT = jnp.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1) * texts.emitted_BT
        per_text_B = gain_BT.sum(1) / jnp.maximum(texts.emitted_BT.sum(1), 1)
        return -per_text_B.mean(), {"log_prob_gap": jnp.abs(jax.lax.stop_gradient(gap_BT)).max()}

    def measure(self, params, teacher_params, tokens_BT, warp):
        raise NotImplementedError("a policy is measured by the rewards of its texts")


class Rollouts:
    """Samples the texts of policy steps, with compiled programs that serve all policies."""

    def __init__(self, pair: Pair, prompts: Sequence[Prompt], config: RolloutConfig, **decoding: Unpack[Decoding]):
        """Checks everything that can be wrong before the first step; raises ValueError for it."""
        if {"sampling", "method"} & {name for name, value in decoding.items() if value is not None}:
            raise ValueError(
                "texts are sampled at config.temperature alone: leave sampling and method out, and name drafter or rule"
            )
        decoding |= dict(sampling=temperature(config.temperature), require_exact=True)
        method = make_method(pair, **decoding)
        count = validate.integer("prompts of a step (policy.batch / group)", config.policy.batch // config.group, 1)
        if len(prompts) < count:
            raise ValueError(
                f"a step takes {count} prompts and there are {len(prompts)}: lower policy.batch, or give more"
            )
        if config.draft is not None and (method.drafter.weights_key is None or pair.vocabulary is not None):
            raise ValueError(
                f"config.draft was given, but {type(method.drafter).__name__} has no draft of the target's tokens that could "
                "learn: leave it out"
            )
        self.prompts, self._config = prompts, config
        self._requests = make_requests(pair, method, prompts, config.max_new_tokens)
        self.length = max(len(request.prompt) for request in self._requests) + config.max_new_tokens
        spare = TOGETHER * pair.shards.count
        self._engine = Engine.create(
            pair, method, self._requests, batch=config.rows, spare=spare, keep_log_probs="sampled"
        )
        self._weights = jax.jit(functools.partial(_weights, pair.target, method.drafter, self._engine.slots))

    def sample(self, step: int, params: Any, draft_params: Any) -> list[Completion]:
        """Samples the texts of a step, ordered by prompt and sample; the same step has the same prompts and noise."""
        config, entropy = self._config, (self._config.policy.seed, step)
        chosen = np.random.default_rng(entropy).choice(
            len(self.prompts), config.policy.batch // config.group, replace=False
        )
        seed = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0])
        requests = [
            dataclasses.replace(self._requests[index], seed=seed, sample_index=sample)
            for index in chosen
            for sample in range(config.group)
        ]
        engine = dataclasses.replace(self._engine, weights=self._weights(params, draft_params))
        queue = Queue(engine, requests, Batch(engine, rows=config.rows, together=TOGETHER))
        order = {int(index): place for place, index in enumerate(chosen)}
        return sorted(queue, key=lambda text: (order[text.prompt_index], text.sample_index))

    def texts(self, completions: Sequence[Completion], rewards: Sequence[float]) -> Texts:
        """Returns completions as arrays, with the advantages that follow from their rewards."""
        shape = len(completions), self.length
        tokens_BT = np.zeros((shape[0], shape[1] + 1), np.int32)
        log_probs_BT, emitted_BT = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for row, text in enumerate(completions):
            prompt = self._requests[text.prompt_index].prompt
            begin, end = len(prompt), len(prompt) + len(text.tokens)
            tokens_BT[row, :end] = (*prompt, *text.tokens)
            log_probs_BT[row, begin - 1 : end - 1] = text.log_probs
            emitted_BT[row, begin - 1 : end - 1] = True
        return Texts(
            tokens_BT=tokens_BT,
            log_probs_BT=log_probs_BT,
            emitted_BT=emitted_BT,
            advantages_B=advantages(rewards, self._config.group),
        )

    def windows(self, completions: Sequence[Completion]) -> np.ndarray:
        """Returns the texts end to end, int32 ``[B, T + 1]``, again from the first where they end: padding teaches nothing."""
        texts = [(*self._requests[text.prompt_index].prompt, *text.tokens) for text in completions]
        return np.resize(np.concatenate(texts).astype(np.int32), (len(texts), self.length + 1))


def _weights(target: Any, drafter: Any, slots: int, params: Any, draft_params: Any) -> Weights:
    return Weights(
        target=target.fit_slots(target.prepare(params), slots),
        draft=drafter.fit_slots(drafter.prepare(draft_params), slots),
    )


def advantages(rewards: Sequence[float], group: int) -> np.ndarray:
    """Returns how many standard deviations each reward lies above the mean of its group; 0 where a group has one reward."""
    rewards_GN = np.asarray(rewards, np.float32).reshape(-1, group)
    spread_G1 = rewards_GN.std(1, keepdims=True)
    above_GN = rewards_GN - rewards_GN.mean(1, keepdims=True)
    return np.where(spread_G1 > SAME, above_GN / np.maximum(spread_G1, SAME), 0.0).astype(np.float32).reshape(-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """What a policy step changes: the policy, and the draft if it learns."""

    policy: TrainState
    draft: TrainState | None = None


def learn(
    pair: Pair,
    prompts: Sequence[Prompt],
    reward: Reward,
    config: RolloutConfig,
    folder: str | os.PathLike,
    *,
    draft_task: Task | None = None,
    intervals: Intervals = Intervals(log=1, checkpoint=20),
    console: Console | None = None,
    **decoding: Unpack[Decoding],
) -> Learned:
    """Makes policy steps, from the latest checkpoint in ``folder`` if there is one.

    Args:
      pair: its target is the policy that learns.
      reward: of a prompt and its completion; higher is better.
      draft_task: how the draft learns where ``config.draft`` is given: `TrainModel`, or `TrainHead` of the pair's head.
      decoding: drafter, rule and draft length, as in `generate`. Rules and drafters must be lossless.

    Raises:
      ValueError: arguments that do not fit, before anything is sampled; a reward that is no number; or the folder holds
        a run of other settings or shapes.
      FloatingPointError: the loss is no longer finite; that state is not saved.
    """
    if (config.draft is None) != (draft_task is None):
        raise ValueError("config.draft and draft_task were not given together: a draft that learns needs both")
    rollouts, folder, console = Rollouts(pair, prompts, config, **decoding), storage.place(folder), console or Console()
    told = repr((draft_task, sorted(decoding.items()), list(prompts)))
    recorded = {"rollouts": dataclasses.asdict(config), "prompts": len(prompts)}
    recorded["sha256_of_task_decoding_prompts"] = hashlib.sha256(told.encode()).hexdigest()
    check_run(folder, recorded)
    storage.write_json(folder / "run.json", recorded)
    num_tokens = getattr(pair.tokenizer, "vocab_size", pair.target.vocab_size)
    tasks = PolicyGradient(pair.target, config.temperature, config.clip, num_tokens), draft_task
    ids = pair.draft_params.get(DRAFT_IDS) if isinstance(pair.draft_params, Mapping) else None
    with contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints:
        state = _restored(_first_state(pair, tasks, config), checkpoints)
        done = int(state.policy.step)
        log = MetricsLog(folder / "metrics.jsonl", resumed_at=done)
        progress = Progress(config.policy.steps, config.policy.batch * config.max_new_tokens, done, console)
        for step in range(done, config.policy.steps):
            begin = time.perf_counter()
            completions = rollouts.sample(step, state.policy.params, _draft_params(pair, state, ids))
            sampled = time.perf_counter()
            rewards = [checked_reward(reward, prompts[text.prompt_index], text) for text in completions]
            texts = rollouts.texts(completions, rewards)
            if not texts.advantages_B.any():
                progress.note(f"step {step + 1}: all texts of each prompt have the same reward, and teach nothing")
            rewarded = time.perf_counter()
            windows = rollouts.windows(completions)
            state, numbers = _learn_from(texts, windows, state, tasks, config, ids)
            check_finite(step + 1, numbers, checkpoints.latest)
            numbers |= {"reward": float(np.mean(rewards)), **_counts(completions)}
            numbers |= {"seconds_sampling": sampled - begin, "seconds_learning": time.perf_counter() - rewarded}
            log.write(step + 1, **numbers)
            due = intervals.due(step + 1, config.policy.steps)
            if "log" in due:
                shown = ("reward", "acceptance", "tokens_per_round", "loss")
                progress.report(step + 1, **{name: numbers[name] for name in shown if name in numbers})
            if "checkpoint" in due:
                checkpoints.save(step + 1, params=state.policy.params, rest=_rest(state))
    return state


def _draft_params(pair: Pair, state: Learned, ids: Any) -> Any:
    """Returns the draft's parameters of this step, with the ids of a head whose vocabulary is reduced."""
    if state.draft is None:
        return pair.draft_params
    return state.draft.params | ({} if ids is None else {DRAFT_IDS: ids})


def _first_state(pair: Pair, tasks: tuple[Task, Task | None], config: RolloutConfig) -> Learned:
    policy = init_state(tasks[0], config.policy, pair.target_params)
    if tasks[1] is None:
        return Learned(policy=policy)
    trained = {name: leaf for name, leaf in pair.draft_params.items() if name != DRAFT_IDS}
    return Learned(policy=policy, draft=init_state(tasks[1], config.draft, trained))


def _learn_from(
    texts: Texts, windows: Any, state: Learned, tasks: tuple[Task, Task | None], config: RolloutConfig, ids: Any
) -> tuple[Learned, dict[str, float]]:
    """Makes an update of the policy, and then of the draft, if it learns, on windows of texts; returns what they measured."""
    (policy_task, draft_task), draft, of_draft = tasks, state.draft, {}
    policy, numbers = _update(policy_task, config.policy, state.policy, None, texts)
    if draft_task is not None:
        teacher = draft_task.teacher(policy.params, ids)
        draft, of_draft = _update(draft_task, config.draft, draft, teacher, windows)
    numbers |= {f"draft/{name}": value for name, value in of_draft.items()}
    return Learned(policy=policy, draft=draft), {name: float(value) for name, value in numbers.items()}


def checked_reward(reward: Reward, prompt: Prompt, text: Completion) -> float:
    """Returns the reward of a text; raises ValueError, with its prompt, if it is no finite number."""
    value = reward(prompt, text)
    return validate.number(f"the reward of prompt {text.prompt_index}, sample {text.sample_index},", value, -np.inf)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _update(task: Task, config: TrainConfig, state: TrainState, teacher_params: Any, batch: Any) -> Any:
    """Makes one update from a batch that is split into microbatches."""
    split = jax.tree.map(lambda x: x.reshape(config.microbatches, -1, *x.shape[1:]), batch)
    return train_step(task, config, state, teacher_params, split)


def _counts(completions: Sequence[Completion]) -> dict[str, float]:
    """Returns tokens, tokens per round, and the acceptance of drafted tokens."""
    stats = sum((text.stats for text in completions[1:]), completions[0].stats)
    counts = {"tokens": stats.emitted, "tokens_per_round": stats.emitted_per_round}
    return counts | ({"acceptance": stats.acceptance_rate} if sum(stats.reached) else {})


def _rest(state: Learned) -> tuple[Any, ...]:
    """Returns what a checkpoint holds beside the policy's parameters."""
    return state.policy.step, state.policy.opt_state, state.draft


def _restored(state: Learned, checkpoints: Checkpoints) -> Learned:
    """Returns the state of the latest checkpoint, or ``state`` where there is none."""
    if checkpoints.latest is None:
        return state
    fresh = state.policy.params, _rest(state)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), fresh)
    saved = checkpoints.restore(params=shapes[0], rest=shapes[1])
    step, opt_state, draft = saved["rest"]
    return Learned(policy=TrainState(step=step, params=saved["params"], opt_state=opt_state), draft=draft)
