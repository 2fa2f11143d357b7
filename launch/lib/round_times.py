"""Times rounds of a pair with random weights: as long as those of a trained pair of the same shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from launch.lib.experiment import ExperimentConfig, bare_pair
from launch.lib.shapes import first_layers, head_of, known_models
from specsamp.analysis.timing import Quartiles
from specsamp.analysis.workload import Workload, decoders
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.pair import Pair
from specsamp.mesh.layout import make_mesh, put
from specsamp.mesh.sharded import draft_layout
from specsamp.mesh.sharded_head import shard_head
from specsamp.models.heads import FeatureHead, HeadConfig
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.warp import chain, temperature, top_p
from specsamp.tpu.ledger import Setting
from specsamp.tpu.shapes import Shape

SAMPLING = chain(temperature(0.8), top_p(0.95))
PROMPT, TOKENS, SPARE = 16, 64, 64


def random_pair(config: ExperimentConfig, batch: int) -> Pair:
    """Makes the target of a configuration and what drafts for it over all devices, with random weights, whatever its mesh.

    Raises:
      ValueError: its shapes are not known here, or do not divide over the devices.
    """
    models, count = known_models(config), jax.device_count()
    if "target" not in models or (config.drafter == "model" and "draft" not in models):
        raise ValueError("the shapes of this pair are not known here: forecasts are of public pairs and presets")
    fewer = draft_devices(config, models, count)
    mesh = None
    if count > 1:
        heads = models["target"].config.num_kv_heads
        mesh = make_mesh(1, count, draft_model_parallelism=fewer, num_kv_heads=heads, rows=batch)
    draft = models["draft"] if config.drafter == "model" else None
    pair = bare_pair(models["target"], draft, 0, mesh=mesh, draft_model_parallelism=fewer)
    return with_random_head(pair, head_of(config, models["target"].config), mesh) if config.drafter == "head" else pair


def with_random_head(pair: Pair, config: HeadConfig, mesh: Mesh | None) -> Pair:
    """Adds a head with random weights."""
    head = FeatureHead(config)
    params = jax.tree.map(
        lambda x: x.astype(config.layer.compute_dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x,
        head.init(jax.random.key(1, impl="threefry2x32")),
    )
    if mesh is not None:
        head = shard_head(head, draft_layout(mesh))
        params = put(params, head.param_shardings(params))
    return dataclasses.replace(pair, head=head, draft_params=params)


def draft_shape(config: ExperimentConfig) -> Shape:
    """Returns what a step of the drafter of a configuration streams.

    Raises:
      ValueError: an early exit that the target does not have.
    """
    models = known_models(config)
    if config.drafter == "head":
        return Shape.of_head(head_of(config, models["target"].config))
    if config.drafter == "early_exit":
        return Shape.of(first_layers(models["target"], config.exit_layer).config)
    return Shape.of(models["draft"].config)


def draft_devices(config: ExperimentConfig, models: Mapping[str, TransformerLM], count: int) -> int:
    """Returns how many of ``count`` devices hold one copy of what drafts together; inside the target all of them do."""
    if config.drafter != "model":
        return count
    return min(config.mesh.draft_model_parallelism or math.gcd(models["draft"].config.num_heads, count), count)


def setting_config(setting: Setting) -> ExperimentConfig:
    """Reads the configuration of a setting, with its drafter."""
    config = ExperimentConfig.from_file(setting.config)
    point = {"drafter": "model" if setting.drafter == "none" else setting.drafter, "exit_layer": setting.exit_layer}
    if setting.drafter == "head" and config.drafter != "head":
        point["hugging_face.draft"] = ""  # a model; the head is then EAGLE-3's
    return config.turned(point)


def round_ms(pair: Pair, drafter: Drafter, batch: int, slots: int, repeats: int) -> Quartiles:
    """Returns the milliseconds of a round, nothing but the loop in them.

    Args:
      slots: of the caches, about.
    """
    work = Workload(batch=batch, prompt_length=PROMPT, max_new_tokens=TOKENS, repeats=repeats)
    side = decoders(pair, {"it": (drafter, TokenRule())}, SAMPLING, work, least_length=max(slots - SPARE, 0))["it"]
    side.decode(0)  # compiles
    timings = [side.decode(repeat) for repeat in range(repeats)]
    return Quartiles.of(np.array([timing.loop_seconds / timing.rounds for timing in timings]) * 1e3)


def devices_here() -> str:
    """Names the devices at hand, for people."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
