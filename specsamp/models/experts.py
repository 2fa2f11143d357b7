"""Mixture-of-experts feed-forward layers (Shazeer et al., arXiv 1701.06538).

A router chooses k experts for each token, and their weights (*shares*) in its result. A call reads
only the chosen experts, one in each step of a loop: a gather would write a copy of their matrices
to memory.

- Few tokens: each chosen expert multiplies all tokens, with a share of zero for tokens routed
  elsewhere.
- Many tokens are sorted by expert, and padded to blocks; each step of the loop multiplies a block
  by its expert.

On TPUs a kernel does calls of few tokens, with the routing (`specsamp.models.kernels.mix_experts`).

Over a mesh each device has a part of the width of each expert, or whole experts
(`specsamp.mesh.layout`). It sums the results of its experts for all tokens, and one all-reduce sums
over the devices.
"""

import contextlib
import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from specsamp.models.config import ACTIVATIONS, ExpertsConfig, TransformerConfig
from specsamp.models.int8 import Int8Weight
from specsamp.models.interface import DeviceLayout, Kernels
from specsamp.models.modules import SharedExpert, parameter, weight
from specsamp.models.products import contract, contract_slice

Array = jax.Array

# Of matrices [E, F, D].
STACKED_AXES = dict.fromkeys(("gate", "up", "down"), ("experts", "expert_mlp", "embed"))
# Of biases that each device adds to its part of the products.
BIAS_AXES = dict.fromkeys(("gate_bias", "up_bias"), ("experts", "expert_mlp"))
# Tokens of a call, of all sequences, up to which every chosen expert multiplies all of them.
FEW = 64
BLOCKS = (8, 256)  # fewest and most tokens of a block

# The name of the loop in a compiled program; `expected_steps` reads these numbers.
SCOPE = "experts_{tokens}_tokens_{chosen}_of_{total}_here_{here}_blocks_of_{block}"
_SCOPE = re.compile(re.sub(r"{(\w+)}", r"(?P<\1>\\d+)", SCOPE))


class Experts(nn.Module):
    """Gated experts with a router, ``[B, T, D] -> [B, T, D]``."""

    config: TransformerConfig
    layout: DeviceLayout = DeviceLayout()
    kernels: Kernels | None = None

    inner_spec = "RD,FD->RF"  # of the products with gate and up

    @nn.compact
    def __call__(self, x_BTD: Array) -> Array:
        config, experts = self.config, self.config.experts
        width, total = config.width, experts.num_experts
        router_DE = weight(self, "router", (width, total), ("embed", None))
        fan_in = {"gate": width, "up": width, "down": 2 * config.num_layers * experts.width}
        stacked = {name: self.declare(name, fan_in[name]) for name in STACKED_AXES}
        x_RD = x_BTD.reshape(-1, width)
        logits_RE = contract("RD,DE->RE", x_RD, router_DE, dtype=jnp.float32)
        bias_ED = None
        if experts.bias:
            logits_RE = logits_RE + self._bias("router_bias", (total,), (None,))[None]
            for name, axes in BIAS_AXES.items():
                stacked[name] = self._bias(name, (total, experts.width), axes)
            bias_ED = self._bias("down_bias", (total, width), (None, "embed"))
        y_RD = self._mix(x_RD, logits_RE, stacked)
        if bias_ED is not None:  # once, and not on every device with a part of the width
            y_RD = y_RD + contract("RE,ED->RD", route(logits_RE, experts), bias_ED)
        return y_RD.astype(x_BTD.dtype).reshape(x_BTD.shape)

    def _bias(self, name: str, shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Array:
        return parameter(self, name, shape, axes).astype(jnp.float32)

    def declare(self, name: str, fan_in: int) -> Array | Int8Weight:
        """Declares the matrices of all experts; returns their values."""
        experts = self.config.experts
        shape = (experts.num_experts, experts.width, self.config.width)
        return weight(self, name, shape, STACKED_AXES[name], fan_in=fan_in)

    def _mix(self, x_RD: Array, logits_RE: Array, stacked: dict[str, Any]) -> Array:
        """Returns the sum of the results of the experts on all devices, float32."""
        config, layout, kernels = self.config, self.layout, self.kernels
        known, gate = STACKED_AXES | BIAS_AXES, stacked["gate"]
        axes = {name: PartitionSpec(*known[name]) for name in stacked}
        spec = layout.spec(axes["gate"], gate.shape)
        part = layout.part_shape(axes["gate"], gate.shape)
        over_experts, over = next(iter(spec), None), tuple(jax.tree.leaves(tuple(spec)))
        in_kernel = kernels is not None and kernels.take_experts(
            len(x_RD), part, jax.tree.leaves(gate)[0].dtype
        )

        def mix(x_RD: Array, routing_RE: Array, stacked: dict[str, Any]) -> Array:
            if in_kernel:
                first = part[0] * (0 if over_experts is None else jax.lax.axis_index(over_experts))
                with _scope(config.experts, len(x_RD), part[0], len(x_RD)):
                    y_RD = kernels.mix_experts(config, x_RD, routing_RE, stacked, jnp.int32(first))
            else:
                y_RD = mix_experts(config, self.inner_spec, x_RD, routing_RE, stacked)
            return jax.lax.psum(y_RD, over) if over else y_RD

        routing_RE = logits_RE if in_kernel else route(logits_RE, config.experts)
        of_routing = PartitionSpec() if in_kernel else PartitionSpec(None, over_experts)
        in_specs = (PartitionSpec(), of_routing, layout.specs(axes, stacked))
        return layout.per_device(mix, in_specs, PartitionSpec())(x_RD, routing_RE, stacked)


class SparseFeedForward(nn.Module):
    """The experts of a layer, and the one that all tokens have."""

    config: TransformerConfig
    layout: DeviceLayout
    kernels: Kernels | None = None

    @nn.compact
    def __call__(self, x_BTD: Array) -> Array:
        return run_experts(Experts(self.config, self.layout, self.kernels, name="experts"), x_BTD)


def run_experts(experts: Experts, x_BTD: Array) -> Array:
    """Returns the sum of the results of the experts, and of the one that all tokens have, which it
    declares beside them.
    """
    made_BTD = experts(x_BTD)
    if experts.config.experts.shared_width:
        made_BTD = made_BTD + SharedExpert(experts.config, name="shared")(x_BTD)
    return made_BTD


def route(logits_RE: Array, experts: ExpertsConfig) -> Array:
    """Returns the share of each expert in each token's result, float32; 0 for experts that are not
    chosen.

    Args:
      logits_RE: float32, of the router. Among equal logits the first experts are chosen.
    """
    chosen_Rk, ids_Rk = jax.lax.top_k(jax.nn.softmax(logits_RE, axis=-1), experts.experts_per_token)
    if experts.normalised:
        chosen_Rk = chosen_Rk / chosen_Rk.sum(axis=-1, keepdims=True)
    is_chosen_RkE = ids_Rk[:, :, None] == jnp.arange(experts.num_experts)[None, None]
    return jnp.sum(jnp.where(is_chosen_RkE, chosen_Rk[:, :, None], 0.0), axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def mix_experts(
    config: TransformerConfig, spec: str, x_RD: Array, shares_RE: Array, stacked: dict[str, Any]
) -> Array:
    """Returns each token's sum over experts of share times result, ``[R, D]`` float32.

    JAX cannot differentiate a loop of data-dependent length. So for gradients every expert
    multiplies every token.

    Args:
      spec: of the products with gate and up, see `Experts.inner_spec`.
      x_RD: the tokens of a call.
      shares_RE: of the experts of this device.
      stacked: their matrices, or a part of the width of each; and biases of gate and up.
    """
    tokens, here = shares_RE.shape
    block = block_size(tokens, config.experts)
    make = functools.partial(_one_expert, config, stacked, spec)
    with _scope(config.experts, tokens, here, block):
        if tokens <= block:
            return _all_tokens(make, x_RD, shares_RE)
        most = -(-tokens * min(config.experts.experts_per_token, here) // block) + here
        return _in_blocks(make, x_RD, shares_RE, block, most)


def _forward(config, spec, *operands):
    return mix_experts(config, spec, *operands), operands


def _backward(config, spec, operands, cotangent_RD):
    def mix_all(x_RD, shares_RE, stacked):
        def add(y_RD, expert):
            made_RD = _one_expert(config, stacked, spec, x_RD, expert)
            return y_RD + shares_RE[:, expert][:, None] * made_RD, None

        experts_E = jnp.arange(shares_RE.shape[1])
        return jax.lax.scan(jax.checkpoint(add), jnp.zeros(x_RD.shape, jnp.float32), experts_E)[0]

    return jax.vjp(mix_all, *operands)[1](cotangent_RD)


mix_experts.defvjp(_forward, _backward)


def block_size(tokens: int, experts: ExpertsConfig) -> int:
    """Returns the number of tokens in a block.

    Few tokens form a single block. With many tokens, a block has two to four times the mean number
    of tokens per expert, so that most experts need one block.
    """
    if tokens <= FEW:
        return max(tokens, 1)
    mean = tokens * experts.experts_per_token / experts.num_experts
    return min(max(1 << int(2 * mean).bit_length(), BLOCKS[0]), BLOCKS[1], tokens)


def _scope(
    experts: ExpertsConfig, tokens: int, here: int, block: int
) -> contextlib.AbstractContextManager:
    chosen, total = experts.experts_per_token, experts.num_experts
    return jax.named_scope(
        SCOPE.format(tokens=tokens, chosen=chosen, total=total, here=here, block=block)
    )


def expected_steps(scope: str) -> float | None:
    """Returns the expected number of steps of the loop with this scope; None for scopes of other
    loops.

    The device with most blocks determines the number, see `ExpertsConfig.expected_blocks`.
    """
    found = _SCOPE.search(scope)
    if found is None:
        return None
    numbers = {name: int(value) for name, value in found.groupdict().items()}
    experts = ExpertsConfig(
        num_experts=numbers["total"], experts_per_token=numbers["chosen"], width=1
    )
    return experts.expected_blocks(
        numbers["tokens"], numbers["block"], numbers["total"] // numbers["here"]
    )


def _one_expert(
    config: TransformerConfig, stacked: dict[str, Any], spec: str, x_RD: Array, expert: Array
) -> Array:
    """Returns one expert's result for each token, float32."""

    def project(name):
        y_RF = contract_slice(spec, x_RD, stacked[name], expert, dtype=jnp.float32)
        if f"{name}_bias" not in stacked:
            return y_RF
        bias_EF = stacked[f"{name}_bias"]
        return y_RF + jax.lax.dynamic_index_in_dim(bias_EF, expert)

    activation, experts = ACTIVATIONS[config.activation], config.experts
    inner_RF = activation(experts.clamp_gate(project("gate"))) * experts.clamp_up(project("up"))
    inner_RF = inner_RF.astype(x_RD.dtype)
    return contract_slice("RF,FD->RD", inner_RF, stacked["down"], expert, dtype=jnp.float32)


def _all_tokens(make: Any, x_RD: Array, shares_RE: Array) -> Array:
    """Multiplies all tokens by each chosen expert."""
    is_touched_E = jnp.any(shares_RE != 0, axis=0)
    experts_E = jnp.argsort(~is_touched_E)  # chosen experts first

    def add(i: Array, y_RD: Array) -> Array:
        expert = experts_E[i]
        share_R1 = jax.lax.dynamic_slice_in_dim(shares_RE, expert, 1, axis=1)
        return y_RD + jnp.where(share_R1 != 0, share_R1 * make(x_RD, expert), 0.0)

    return jax.lax.fori_loop(0, is_touched_E.sum(), add, jnp.zeros(x_RD.shape, jnp.float32))


def _in_blocks(make: Any, x_RD: Array, shares_RE: Array, block: int, most: int) -> Array:
    """Multiplies the tokens of each expert by it, in at most ``most`` padded blocks."""
    tokens = len(x_RD)
    is_chosen_ER = (shares_RE != 0).T
    blocks_E = -(-is_chosen_ER.sum(axis=1) // block)
    last_E = jnp.cumsum(blocks_E)  # the first block behind each expert's
    # The index of each token in the blocks; the tokens of an expert begin in its first block.
    place_ER = ((last_E - blocks_E) * block)[:, None] + jnp.cumsum(is_chosen_ER, axis=1) - 1
    place_ER = jnp.where(is_chosen_ER, place_ER, most * block)  # dropped
    token_ER = jnp.broadcast_to(jnp.arange(tokens)[None], place_ER.shape)
    # Padding names no token.
    token_P = jnp.full(most * block, tokens).at[place_ER].set(token_ER, mode="drop")

    def add(i: Array, y_RD: Array) -> Array:
        expert = jnp.sum(last_E <= i)
        token_b = jax.lax.dynamic_slice_in_dim(token_P, i * block, block)
        share_b = shares_RE.at[token_b, expert].get(mode="fill", fill_value=0)
        made_bD = make(x_RD.at[token_b].get(mode="fill", fill_value=0), expert)
        return y_RD.at[token_b].add(share_b[:, None] * made_bD, mode="drop")

    return jax.lax.fori_loop(0, last_E[-1], add, jnp.zeros(x_RD.shape, jnp.float32))
