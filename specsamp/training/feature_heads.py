"""Trains heads that draft from a target's hidden states, by EAGLE-3's training-time test (arXiv
2503.01840, section 3.2).

In decoding a head reads the target's hidden states once, then its own features. Training does the
same for S steps. At step i row t reads the true token x_{t+1+i} and the feature that step
i - 1 returned for the row (at step 0 the target's hidden states), at position t + i, and predicts
the token after x_{t+1+i}. It attends to the same features as in decoding: the target's of rows up
to t, then its own of each step. The loss compares it with the target:

    loss = sum_i decay^i mean_t D(q_{t+1+i}, p_{t,i}),

with D one of `DIVERGENCES`, or cross-entropy on the text.

Medusa heads go through the same test. They return the feature that they read, so step i is the head
at offset i, which predicts x_{t+2+i} from the target's hidden state at t. Of several modules for
multi-token prediction, step i is module i: it reads the features of module i - 1, at position t,
and attends to its own rows up to t.

The target runs in the same step, so no hidden states are stored. With a reduced vocabulary ``q`` is
renormalised over it, and positions whose likeliest token is outside are left out. The logged
acceptance of each step is always under the whole ``q``.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from specsamp import validate
from specsamp.models.cache import softmax_with_sinks
from specsamp.models.decoder import OUTPUT_EMBEDDING
from specsamp.models.heads import DRAFT_IDS, FeatureHead
from specsamp.models.mtp import ModuleChain
from specsamp.models.products import contract, soft_cap
from specsamp.models.transformer import TransformerLM
from specsamp.models.visibility import Visibility
from specsamp.sampling.warp import Warp, log_probs
from specsamp.training.objective import DIVERGENCES, forward_kl, greedy_agreement, overlap
from specsamp.training.training_task import Task

Array = jax.Array

COUNTED = "counted"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCache:
    """Keys and values of the computed steps; a `LayerCache` for the attention of a head.

    Row t of a step attends to rows up to t of the first step, and to row t of every later one.

    Attributes:
      later: R, the most steps after the first.
      keys, values: of the first step, ``[B, M, T, H]``; None before it.
      own_keys, own_values: of the later steps, ``[R, B, M, T, H]``.
      count: the number of computed later steps.
    """

    later: int = dataclasses.field(metadata={"static": True})
    keys: Array | None = None
    values: Array | None = None
    own_keys: Array | None = None
    own_values: Array | None = None
    count: Array | int = 0

    @property
    def num_slots(self) -> int:
        return self.keys.shape[2] + self.later

    def append(self, k_BMTH: Array, v_BMTH: Array, start_B: Array) -> Self:
        """Adds a step; ``start_B`` is its number, where its positions begin."""
        if self.keys is None:
            room = jnp.zeros((self.later, *k_BMTH.shape), k_BMTH.dtype)
            return dataclasses.replace(
                self, keys=k_BMTH, values=v_BMTH, own_keys=room, own_values=room
            )
        number = start_B[0]
        return dataclasses.replace(
            self,
            own_keys=self.own_keys.at[number - 1].set(k_BMTH),
            own_values=self.own_values.at[number - 1].set(v_BMTH),
            count=number,
        )

    def attend(
        self,
        q_BNTH: Array,
        visible: Visibility,
        *,
        scale: float,
        distances_BNTS: Array | None = None,
        cap: float | None = None,
        sinks_N: Array | None = None,
    ) -> Array:
        batch, heads, length, size = q_BNTH.shape
        kv_heads = self.keys.shape[1]
        q_BMGTH = q_BNTH.reshape(batch, kv_heads, heads // kv_heads, length, size)
        first_BMGTS = contract("BMGTH,BMSH->BMGTS", q_BMGTH, self.keys, dtype=jnp.float32)
        own_BMGTR = contract("BMGTH,RBMTH->BMGTR", q_BMGTH, self.own_keys, dtype=jnp.float32)
        scores = jnp.concatenate([first_BMGTS, own_BMGTR], axis=-1) * scale
        scores = scores if cap is None else soft_cap(scores, cap)
        slots_S = jnp.arange(self.num_slots)
        is_own_S = (slots_S >= length) & (slots_S < length + self.count)
        is_seen_TS = (slots_S[None] <= jnp.arange(length)[:, None]) | is_own_S[None]
        scores = jnp.where(is_seen_TS[None, None, None], scores, -jnp.inf)
        probs = softmax_with_sinks(scores.reshape(batch, heads, length, self.num_slots), sinks_N)
        probs = probs.reshape(scores.shape).astype(q_BNTH.dtype)
        mixed_BMGTH = contract("BMGTS,BMSH->BMGTH", probs[..., :length], self.values)
        mixed_BMGTH = mixed_BMGTH + contract(
            "BMGTR,RBMTH->BMGTH", probs[..., length:], self.own_values
        )
        return mixed_BMGTH.reshape(batch, heads, length, size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainHead(Task):
    """Trains a head with its target as the teacher (`teacher`); a `Task`.

    Attributes:
      head: its parameters are trained, except the ids of a reduced vocabulary.
      target: the model that it reads.
      objective: one of `DIVERGENCES`, or "cross_entropy" on the text, as modules for multi-token
        prediction have it.
      test_steps: S of the training-time test; at most the number of Medusa heads, and the number of
        several modules.
      decay: weight of a step relative to the step before.
      chunk: positions whose logits are in memory at a time. Logits and steps are then computed
        again for the gradient. None: all positions, and nothing is computed again.

    Raises:
      ValueError: an unknown objective, a number out of range, or a head for another target.
    """

    head: FeatureHead
    target: TransformerLM
    objective: str = "forward_kl"
    test_steps: int = 7
    decay: float = 0.8
    chunk: int | None = None

    objectives: ClassVar[tuple[str, ...]] = (*DIVERGENCES, "cross_entropy")

    def __post_init__(self):
        validate.choice("objective", self.objective, self.objectives)
        if self.objective == "cross_entropy" and self.head.config.draft_vocab_size is not None:
            raise ValueError(
                "objective cross_entropy needs the whole vocabulary: set head.draft_vocab_size to 0"
            )
        validate.integer("test_time.test_steps", self.test_steps, 1)
        most = self.head.config.max_tokens
        if most is not None and self.test_steps > most:
            raise ValueError(
                f"test_time.test_steps is {self.test_steps}, but the head drafts {most} tokens at "
                "most"
            )
        if isinstance(self.head, ModuleChain) and self.test_steps != most:
            raise ValueError(
                f"test_time.test_steps is {self.test_steps}, but each of the {most} modules is one "
                "step"
            )
        validate.number("test_time.decay", self.decay, 0, 1, above=True)
        if self.chunk is not None:
            validate.integer("test_time.chunk", self.chunk, 1)
        self.head.check_target(self.target)

    def teacher(self, target_params: Any, draft_ids: np.ndarray | None = None) -> dict[str, Any]:
        """Returns the target's parameters in its compute dtype, and the ids of a reduced
        vocabulary, ``[U]``, increasing.
        """
        dtype = self.target.config.compute_dtype
        return {"target": optax.tree.cast(target_params, dtype), DRAFT_IDS: draft_ids}

    def init(self, key, teacher_params=None):
        params = without_ids(self.head.init(key))
        if teacher_params is None:
            return params
        of_target = teacher_params["target"]
        output_UD = of_target.get(OUTPUT_EMBEDDING, of_target["embedding"])
        if teacher_params[DRAFT_IDS] is not None:
            output_UD = output_UD[teacher_params[DRAFT_IDS]]
        shape, scale_D = self.target.config, None
        if shape.logit_divisor is not None:
            output_UD = output_UD / shape.logit_divisor
        if shape.norm == self.head.config.layer.norm:
            scale_D = of_target["final_norm"]["scale"].astype(jnp.float32) + float(
                shape.norm_offset
            )
        return self.head.config.begin(params, output_UD.astype(jnp.float32), scale_D)

    def param_axes(self):
        return without_ids(self.head.param_axes())

    def teacher_axes(self):
        ids = None if self.head.config.draft_vocab_size is None else PartitionSpec(None)
        return {"target": self.target.param_axes(), DRAFT_IDS: ids}

    def loss(self, params, teacher_params, tokens_BT, key, step=0):
        """See `Task.loss`; also returns the acceptance at each position of a draft, at temperature
        1.
        """
        found = self.measure(params, teacher_params, tokens_BT, None, key)
        return found.pop("loss"), found

    def measure(self, params, teacher_params, tokens_BT, warp, key=None):
        """Returns the objective, and the acceptance at each position of a draft: position i + 1 is
        step i.

        Args:
          warp: of acceptance and modes; None: temperature 1, and modes are not compared.
          key: of random choices; None: they are the same each time.
        """
        weights = self.head.training_weights(params, teacher_params[DRAFT_IDS])
        found = self._averages(weights, teacher_params, tokens_BT, warp, key)
        # No product of matrices, which a TPU would compute in bfloat16.
        results = {"loss": (found.pop("loss") * self._loss_weights()).sum()}
        return results | {
            f"{name}/position_{i}": value
            for name, values_S in found.items()
            for i, value in enumerate(values_S, 1)
        }

    def _loss_weights(self) -> Array:
        """Returns the weights of the steps in the loss, ``[S]``."""
        return self.decay ** jnp.arange(self.test_steps)

    def _averages(
        self, weights: Any, teacher: Any, tokens_BT: Array, warp: Warp | None, key: Array | None
    ) -> dict[str, Array]:
        """Returns averages for each step, ``[S]``."""
        stream_BTD, features_SBTD = self._steps(weights, teacher["target"], tokens_BT)
        length = stream_BTD.shape[1]
        chunk = self.chunk or length
        if length % chunk:
            raise ValueError(f"test_time.chunk {chunk} does not divide windows of {length} tokens")

        def cut(x: Array, axis: int) -> Array:
            return jnp.moveaxis(
                x.reshape(*x.shape[:axis], -1, chunk, *x.shape[axis + 1 :]), axis, 0
            )

        parts = (
            cut(stream_BTD, 1),
            cut(features_SBTD, 2),
            cut(jnp.arange(length), 0),
            cut(tokens_BT[:, 1:], 1),
        )
        compare = functools.partial(self._compare, weights, teacher, warp)
        return step_averages(self._add_up(compare, parts))

    def _add_up(self, compare: Callable[..., Any], parts: Any) -> Any:
        """Returns the sums of ``compare`` over parts, which are in memory one at a time."""
        if self.chunk is not None:
            # Kept for the gradient, which would compute the target's logits of the whole vocabulary
            # again for this alone.
            policy = jax.checkpoint_policies.save_only_these_names(COUNTED)
            compare = jax.checkpoint(compare, policy=policy)
        sums = jax.lax.map(lambda part: compare(*part), parts)
        return jax.tree.map(lambda x: x.sum(axis=0), sums)

    def _steps(self, weights: Any, target_params: Any, tokens_BT: Array) -> tuple[Array, Array]:
        """Runs the target, and the steps of the training-time test.

        Returns:
          The stream behind the target's last layer, ``[B, T, D]``; and the features of each step,
          ``[S, B, T, D]``, which are compared with the target at the same position t, for t > i.
        """
        head = self.head
        layers = *head.hidden_layers, self.target.num_layers - 1
        *hidden, stream_BTD = self.target.forward_streams(target_params, tokens_BT[:, :-1], layers)
        target_weights = {"params": target_params}
        start_B = jnp.zeros(len(tokens_BT), jnp.int32)
        embedded_BTD = head.embed_tokens(weights, self.target, target_weights, tokens_BT, start_B)
        embedded_BTD = embedded_BTD[:, 1:]
        features_BTD = head.fuse(weights, tuple(hidden))
        if isinstance(head, ModuleChain):
            call = head if self.chunk is None else jax.checkpoint(head, static_argnums=(4, 5))
            returned = []
            for number in range(self.test_steps):
                token_BTD = jnp.roll(embedded_BTD, -number, axis=1)
                features_BTD, _ = call(weights, token_BTD, features_BTD, start_B, None, number)
                returned.append(features_BTD)
        else:

            def run(before, step):
                # The last tokens come round to the front; features there are not compared.
                token_BTD = jnp.roll(embedded_BTD, -step, axis=1)
                after = head(
                    weights, token_BTD, before[0], jnp.full(len(tokens_BT), step), before[1]
                )
                return after, after[0]

            run = run if self.chunk is None else jax.checkpoint(run)
            cache = StepCache(later=max(self.test_steps - 1, 1))
            first, features_BTD = run((features_BTD, cache), jnp.int32(0))
            # A loop: one step is compiled.
            _, later = jax.lax.scan(run, first, jnp.arange(1, self.test_steps))
            returned = [features_BTD, *later]
        rolled = [jnp.roll(x_BTD, i, axis=1) for i, x_BTD in enumerate(returned, 1)]
        return stream_BTD, jnp.stack(rolled)

    def _compare(
        self,
        weights: Any,
        teacher: Any,
        warp: Warp | None,
        stream_BTD: Array,
        features_SBTD: Array,
        rows_T: Array,
        labels_BT: Array,
    ) -> dict[str, Array]:
        """Compares each step with some rows of the target; returns sums ``[S]`` of the results of
        `_of_each`.
        """
        imitated_BTU, *compared = self._of_target(weights, teacher, stream_BTD, warp)
        if self.objective == "cross_entropy":
            imitated_BTU = jnp.log(jax.nn.one_hot(labels_BT, self.target.vocab_size))
        of_target = imitated_BTU, *compared

        unembed = functools.partial(self.target.unembed_normed, {"params": teacher["target"]})

        def sums(step, features_BTD):
            logits_BTU = self.head.logits(weights, features_BTD, unembed, step)
            exists_BT = (rows_T > step)[None] & jnp.ones(stream_BTD.shape[:2], bool)
            found = self._of_each(weights, of_target, logits_BTU, exists_BT, warp)
            return jax.tree.map(lambda x_BT: x_BT.sum(dtype=jnp.float32), found)

        if self.head.config.max_tokens is not None:  # each step has other parameters
            return stacked(
                [sums(step, features_BTD) for step, features_BTD in enumerate(features_SBTD)]
            )
        return jax.lax.map(lambda one: sums(*one), (jnp.arange(self.test_steps), features_SBTD))

    def _of_target(
        self, weights: Any, teacher: Any, stream_BTD: Array, warp: Warp | None
    ) -> tuple[Array, ...]:
        """Returns the target's side of `_of_each`, from the stream behind its last layer."""
        target_BTV = target_BTU = self.target.read_out(teacher["target"], stream_BTD)
        ids_U = teacher[DRAFT_IDS]
        is_counted_BT = jnp.ones(target_BTV.shape[:2], bool)
        if ids_U is not None:
            of_draft_BTV = jnp.where(weights["ranks_V"] < len(ids_U), target_BTV, -jnp.inf)
            # Slow on a CPU: argmax.
            is_counted_BT = of_draft_BTV.max(axis=-1) == target_BTV.max(axis=-1)
            is_counted_BT = checkpoint_name(is_counted_BT, COUNTED)
            target_BTU = self._reduced_logits(teacher["target"], ids_U, stream_BTD)
        kept_BTU = target_BTU - jax.nn.logsumexp(target_BTV, axis=-1, keepdims=True)
        warped_BTV = None if warp is None else log_probs(warp, target_BTV)
        return jax.nn.log_softmax(target_BTU), kept_BTU, is_counted_BT, warped_BTV

    def _of_each(
        self,
        weights: Any,
        of_target: tuple[Array, ...],
        logits_BTU: Array,
        exists_BT: Array,
        warp: Warp | None,
    ) -> dict[str, Array]:
        """Compares a head's logits with the target, position by position.

        Returns:
          Arrays ``[B, T]``: the divergence as "loss", and whether it is counted; the acceptance;
          with a warp whether the modes are equal; and whether there is a position.
        """
        target_BTU, kept_BTU, is_counted_BT, warped_BTV = of_target
        draft_BTU = jax.nn.log_softmax(logits_BTU)
        counts_BT = exists_BT & is_counted_BT
        # The cross-entropy is the divergence from a distribution that has one token.
        divergence_BT = DIVERGENCES.get(self.objective, forward_kl)(target_BTU, draft_BTU)
        found = {"loss": divergence_BT * counts_BT, "counted": counts_BT, "exists": exists_BT}
        if warp is None:
            accepted_BT = overlap(kept_BTU, jax.lax.stop_gradient(draft_BTU))
        else:
            draft_BTV = log_probs(warp, self.head.expand(weights, logits_BTU))
            accepted_BT = overlap(warped_BTV, draft_BTV)
            found["greedy_agreement"] = greedy_agreement(warped_BTV, draft_BTV) * exists_BT
        return found | {"acceptance": accepted_BT * exists_BT}

    def _reduced_logits(self, target_params: Any, ids_U: Array, stream_BTD: Array) -> Array:
        """Returns the target's logits ``[B, T, U]`` of some ids, computed from these rows of its
        output.
        """
        ends = {
            name: target_params[name][ids_U]
            for name in ("embedding", OUTPUT_EMBEDDING)
            if name in target_params
        }
        config = dataclasses.replace(
            self.target.config, vocab_size=len(ids_U), num_real_tokens=None
        )
        return TransformerLM(config).read_out(target_params | ends, stream_BTD)


def most_frequent(tokens: np.ndarray, vocab_size: int, count: int) -> np.ndarray:
    """Returns the ``count`` most frequent of ``vocab_size`` ids, ``[count]`` int32, increasing;
    ties go to the lower id.
    """
    order = np.argsort(-np.bincount(tokens, minlength=vocab_size), kind="stable")
    return np.sort(order[:count]).astype(np.int32)


def without_ids(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the trained parameters of a head: all but the ids of a reduced vocabulary."""
    return {name: leaf for name, leaf in tree.items() if name != DRAFT_IDS}


def stacked(trees: Sequence[Any]) -> Any:
    """Returns a tree whose arrays have an axis more, the first: one entry for each of the trees."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *trees)


def step_averages(sums: dict[str, Array]) -> dict[str, Array]:
    """Returns averages of the sums of `TrainHead._compare`: of the loss over counted positions."""
    sums = dict(sums)
    loss_S = sums.pop("loss") / jnp.maximum(sums.pop("counted"), 1)
    exists_S = sums.pop("exists")
    return {"loss": loss_S} | {name: sum_S / exists_S for name, sum_S in sums.items()}
