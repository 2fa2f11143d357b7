"""Learns from rewards of whole texts, which are sampled speculatively: GRPO (DeepSeekMath, arXiv
2402.03300, section 4.1).

    state = learn(pair, prompts, reward, RolloutConfig(policy=TrainConfig(steps=200, batch=32)),
    "runs/policy")

A policy step samples a group of texts for each of some prompts, turns their rewards into advantages
within the group, and makes one update. Parameters are arguments of the compiled programs: a step
compiles nothing, and no parameter goes through the host. All texts of a step have ended before the
parameters change, since later the caches of a row would be of the old policy. Texts follow the
policy with any draft; a constant draft is accepted less and less, unlike a draft that is trained on
the texts (online speculative decoding, arXiv 2310.07177).
"""

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from specsamp import storage, validate
from specsamp.checkpoints.orbax import Checkpoints
from specsamp.checkpoints.params import check_shapes, digest_of_pair, init_shapes
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.engine import Engine
from specsamp.decoding.method import Decoding, make_method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import Prompt, make_requests, with_samples
from specsamp.decoding.results import Completion
from specsamp.decoding.state import Weights
from specsamp.models.heads import DRAFT_IDS
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.warp import chain, first_tokens, log_probs, temperature
from specsamp.serving.batch import Batch
from specsamp.serving.generate_many import TOGETHER, Queue
from specsamp.training.feature_heads import without_ids
from specsamp.training.objective import cross_entropy
from specsamp.training.run_folder import MetricsLog, Progress, check_run
from specsamp.training.trainer import (
    Intervals,
    TrainConfig,
    TrainState,
    check_finite,
    init_state,
    train_update,
)
from specsamp.training.training_task import Task

Array = jax.Array
Reward = Callable[[Prompt, Completion], float]

SAME = 1e-6  # rewards of a group whose standard deviation is smaller teach nothing


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Policy steps.

    Attributes:
      policy: the policy's optimizer; its ``batch`` is the number of texts of a step.
      draft: the draft's optimizer, which makes one update on the texts of each step; None: the
        draft stays as it was.
      group: texts of each prompt.
      max_new_tokens: the budget of a text.
      temperature: of the texts and of the trained policy; above 0.
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
            raise ValueError(
                f"policy.batch {self.policy.batch} is no multiple of group {self.group}"
            )
        if self.draft is not None and self.draft.batch != self.policy.batch:
            raise ValueError(
                f"draft.batch {self.draft.batch} is not the policy's {self.policy.batch}: both "
                "read all texts"
            )

    @property
    def prompts(self) -> int:
        """Returns the number of prompts of a step."""
        return self.policy.batch // self.group


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """The texts of a step.

    Attributes:
      tokens_BT: int32 ``[B, T + 1]``, prompts and completions. After its end a row has the next
        texts, like a window of a training, so that a draft is trained on no padding.
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
    """Raises the probability of texts with positive advantages, and lowers it for negative ones.

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
        ratio_BT = jnp.exp(gap_BT)
        advantages_B1 = texts.advantages_B[:, None]
        clipped_BT = jnp.clip(ratio_BT, 1 - self.clip, 1 + self.clip)
        gain_BT = (
            jnp.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1) * texts.emitted_BT
        )
        per_text_B = gain_BT.sum(1) / jnp.maximum(texts.emitted_BT.sum(1), 1)
        return -per_text_B.mean(), {"log_prob_gap": jnp.abs(jax.lax.stop_gradient(gap_BT)).max()}

    def measure(self, params, teacher_params, tokens_BT, warp):
        raise NotImplementedError("a policy is measured by the rewards of its texts")


class Rollouts:
    """Samples the texts of policy steps, with compiled programs that serve all policies."""

    def __init__(
        self,
        pair: Pair,
        prompts: Sequence[Prompt],
        config: RolloutConfig,
        **decoding: Unpack[Decoding],
    ):
        """Checks everything that can be wrong before the first step; raises ValueError for it."""
        for name in ("sampling", "method"):
            if decoding.get(name) is not None:
                raise ValueError(
                    f"leave {name} out, texts have config.temperature alone: give drafter and rule"
                )
        decoding |= dict(sampling=temperature(config.temperature), require_exact=True)
        self.method = make_method(pair, **decoding)
        if len(prompts) < config.prompts:
            raise ValueError(
                f"a step takes {config.prompts} prompts and there are {len(prompts)}: lower "
                "policy.batch, or give more"
            )
        self._config = config
        self._requests = make_requests(pair, self.method, prompts, config.max_new_tokens)
        self.length = max(len(request.prompt) for request in self._requests) + config.max_new_tokens
        self._engine = Engine.create(
            pair,
            self.method,
            self._requests,
            batch=config.rows,
            spare=TOGETHER * pair.shards.count,
            keep_log_probs="sampled",
        )
        drafter = self.method.drafter
        slots = self._engine.slots

        def prepare(params, draft_params):
            return Weights(
                target=pair.target.fit_slots(pair.target.prepare(params), slots),
                draft=drafter.fit_slots(drafter.prepare(draft_params), slots),
            )

        self._weights = jax.jit(prepare)

    def describe(self, draft_task: Task | None) -> dict[str, Any]:
        """Returns the identity of a run, which must not change when it resumes: the configuration,
        and digests of all other inputs.
        """
        told = {
            "prompts": [each.prompt for each in self._requests],
            "decoding": self.method,
            "draft_task": draft_task,
        }
        digests = {
            name: hashlib.sha256(repr(value).encode()).hexdigest() for name, value in told.items()
        }
        return {"rollouts": dataclasses.asdict(self._config)} | digests

    def sample(self, step: int, params: Any, draft_params: Any) -> list[Completion]:
        """Samples the texts of a step, ordered by prompt and sample; the same step has the same
        prompts and noise.
        """
        config = self._config
        entropy = np.random.SeedSequence((config.policy.seed, step))
        random = np.random.default_rng(entropy)
        chosen = random.choice(len(self._requests), config.prompts, replace=False).tolist()
        seed = int(entropy.generate_state(1, np.uint64)[0])
        requests = with_samples(
            [dataclasses.replace(self._requests[index], seed=seed) for index in chosen],
            config.group,
        )
        engine = dataclasses.replace(self._engine, weights=self._weights(params, draft_params))
        queue = Queue(engine, requests, Batch(engine, rows=config.rows, together=TOGETHER))
        return sorted(queue, key=lambda text: (chosen.index(text.prompt_index), text.sample_index))

    def texts(self, completions: Sequence[Completion], rewards: Sequence[float]) -> Texts:
        """Returns completions as arrays, with the advantages that follow from their rewards, which
        must be numbers.
        """
        for text, reward in zip(completions, rewards):
            validate.number(
                f"the reward of prompt {text.prompt_index}, sample {text.sample_index},",
                reward,
                -np.inf,
            )
        log_probs_BT = np.zeros((len(completions), self.length), np.float32)
        emitted_BT = np.zeros_like(log_probs_BT, bool)
        stream = []
        starts = []
        for row, text in enumerate(completions):
            prompt = self._requests[text.prompt_index].prompt
            emitted = slice(len(prompt) - 1, len(prompt) - 1 + len(text.tokens))
            log_probs_BT[row, emitted] = text.log_probs
            emitted_BT[row, emitted] = True
            starts.append(len(stream))
            stream += (*prompt, *text.tokens)
        at_BT = np.array(starts)[:, None] + np.arange(self.length + 1)[None]
        return Texts(
            tokens_BT=np.array(stream, np.int32)[at_BT % len(stream)],
            log_probs_BT=log_probs_BT,
            emitted_BT=emitted_BT,
            advantages_B=advantages(rewards, self._config.group),
        )


def advantages(rewards: Sequence[float], group: int) -> np.ndarray:
    """Returns how many standard deviations each reward lies above the mean of its group; 0 where a
    group has one reward.
    """
    rewards_GN = np.asarray(rewards, np.float32).reshape(-1, group)
    spread_G1 = rewards_GN.std(1, keepdims=True)
    above_GN = rewards_GN - rewards_GN.mean(1, keepdims=True)
    differs_G1 = spread_G1 > SAME
    return np.divide(above_GN, spread_G1, out=np.zeros_like(above_GN), where=differs_G1).ravel()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Learned:
    """The trained state: the policy, and the draft if it is trained."""

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
      pair: its target is the policy.
      reward: of a prompt and its completion; higher is better.
      draft_task: the draft's task if ``config.draft`` is given: `TrainModel`, or `TrainHead`
        of the pair's head. On a mesh too its models are a `TransformerLM`.
      decoding: drafter, rule and draft length, as in `generate`. Rules and drafters must be
        lossless.

    Raises:
      ValueError: arguments that do not fit, before anything is sampled; a reward that is no number;
        or the folder holds a run of other settings, weights or shapes, or is in use.
      FloatingPointError: the loss is no longer finite; that state is not saved.
    """
    if (config.draft is None) != (draft_task is None):
        raise ValueError(
            "config.draft and draft_task were not given together: a draft that learns needs both"
        )
    rollouts = Rollouts(pair, prompts, config, **decoding)
    folder = storage.place(folder)
    if draft_task is not None:
        _check_draft(pair, rollouts.method.drafter, draft_task)
    recorded = rollouts.describe(draft_task) | {"weights": digest_of_pair(pair)}
    check_run(folder, recorded)
    num_tokens = getattr(pair.tokenizer, "vocab_size", pair.target.vocab_size)
    # On a mesh the compiler splits what an update computes.
    policy_task = PolicyGradient(
        TransformerLM(pair.target.config), config.temperature, config.clip, num_tokens
    )
    is_first = jax.process_index() == 0
    with (
        storage.locked(folder, wait=False) if is_first else contextlib.nullcontext(),
        contextlib.closing(Checkpoints(folder / "checkpoints")) as checkpoints,
    ):
        state = _begin(pair, policy_task, draft_task, config, checkpoints)
        storage.write_json(folder / "run.json", recorded)
        done = int(state.policy.step)
        log = MetricsLog(folder / "metrics.jsonl", resumed_at=done)
        tokens = config.policy.batch * config.max_new_tokens
        progress = Progress(config.policy.steps, tokens, done, console or Console())
        for step in range(done, config.policy.steps):
            begin = time.perf_counter()
            draft_params = pair.draft_params
            if state.draft is not None:  # the ids of a reduced vocabulary stay
                draft_params = {**draft_params, **state.draft.params}
            completions = rollouts.sample(step, state.policy.params, draft_params)
            sampled = time.perf_counter()
            rewards = [reward(prompts[text.prompt_index], text) for text in completions]
            texts = rollouts.texts(completions, rewards)
            if not texts.advantages_B.any():
                progress.note(
                    f"step {step + 1}: all texts of each prompt have the same reward, and teach "
                    "nothing"
                )
            rewarded = time.perf_counter()
            policy, numbers = train_update(policy_task, config.policy, state.policy, None, texts)
            draft = state.draft
            if draft_task is not None:
                teacher = draft_task.teacher(policy.params, pair.draft_params.get(DRAFT_IDS))
                draft, of_draft = train_update(
                    draft_task, config.draft, draft, teacher, texts.tokens_BT
                )
                numbers |= {f"draft/{name}": value for name, value in of_draft.items()}
            state = Learned(policy=policy, draft=draft)
            numbers = {name: float(value) for name, value in numbers.items()}
            check_finite(step + 1, numbers, checkpoints.latest)
            numbers |= {
                "reward": float(np.mean(rewards)),
                **_counts(completions),
                "seconds_sampling": sampled - begin,
                "seconds_learning": time.perf_counter() - rewarded,
            }
            log.write(step + 1, **numbers)
            due = intervals.due(step + 1, config.policy.steps)
            if "log" in due:
                shown = ("reward", "acceptance", "tokens_per_round", "loss")
                progress.report(
                    step + 1, **{name: numbers[name] for name in shown if name in numbers}
                )
            if "checkpoint" in due:
                checkpoints.save(step + 1, params=state.policy.params, rest=_rest(state))
    return state


def _check_draft(pair: Pair, drafter: Drafter, task: Task) -> None:
    """Raises ValueError unless a task trains what a drafter drafts with."""
    if pair.vocabulary is not None:
        raise ValueError(
            "draft_task was given, but the pair's draft has another tokenizer than the texts: "
            "leave it out"
        )
    if not jax.tree.leaves(jax.eval_shape(drafter.prepare, pair.draft_params)):
        raise ValueError(
            f"draft_task was given, but {type(drafter).__name__} has no draft model: leave it out"
        )
    trained = init_shapes(task)
    check_shapes("the pair's draft", without_ids(pair.draft_params), trained)


def _begin(
    pair: Pair,
    policy_task: Task,
    draft_task: Task | None,
    config: RolloutConfig,
    checkpoints: Checkpoints,
) -> Learned:
    """Returns the state of the latest checkpoint; without a checkpoint, that of step 0."""
    state = Learned(
        policy=init_state(policy_task, config.policy, pair.target_params),
        draft=draft_task and init_state(draft_task, config.draft, without_ids(pair.draft_params)),
    )
    if pair.shards.mesh is not None:
        # Counters are on all devices; moments lie as their parameters.
        on_all = NamedSharding(pair.shards.mesh, PartitionSpec())
        state = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, on_all), state)
    if checkpoints.latest is None:
        return state
    saved = checkpoints.restore(params=state.policy.params, rest=_rest(state))
    step, opt_state, draft = saved["rest"]
    policy = TrainState(step=step, params=saved["params"], opt_state=opt_state)
    return Learned(policy=policy, draft=draft)


def _counts(completions: Sequence[Completion]) -> dict[str, float]:
    """Returns tokens, tokens per round, and the acceptance of drafted tokens."""
    stats = sum(text.stats for text in completions)
    counts = {"tokens": stats.emitted, "tokens_per_round": stats.emitted_per_round}
    return counts | ({"acceptance": stats.acceptance_rate} if sum(stats.reached) else {})


def _rest(state: Learned) -> tuple[Any, ...]:
    """Returns the state in a checkpoint other than the policy's parameters."""
    return state.policy.step, state.policy.opt_state, state.draft
