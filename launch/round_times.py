"""Times rounds of a pair with random weights: as long as those of a trained pair of the same shapes."""

from __future__ import annotations

import math

import jax
import numpy as np
from ml_collections import ConfigDict

from experiment import bare_pair
from shapes import known_models
from specsamp.analysis.timing import Quartiles
from specsamp.analysis.workload import Workload, decoders
from specsamp.decoding.drafters import ModelDrafter, NoDrafter
from specsamp.decoding.loop import decode_window
from specsamp.decoding.pair import Pair
from specsamp.mesh.layout import make_mesh
from specsamp.models.config import TransformerConfig
from specsamp.sampling.rejection import TokenRule
from specsamp.sampling.warp import chain, temperature, top_p

SAMPLING = chain(temperature(0.8), top_p(0.95))
PROMPT, TOKENS, SPARE = 16, 64, 64


def random_pair(config: ConfigDict, batch: int) -> Pair:
    """Makes the pair of a configuration over all devices, with random weights, whatever its mesh.

    Raises:
      ValueError: its shapes are not known here, or do not divide over the devices.
    """
    models, count = known_models(config), jax.device_count()
    if set(models) != {"target", "draft"}:
        raise ValueError("the shapes of this pair are not known here: forecasts are of public pairs and presets")
    fewer = draft_devices(config, models["draft"].config, count)
    mesh = None
    if count > 1:
        heads = models["target"].config.num_kv_heads
        mesh = make_mesh(1, count, draft_model_parallelism=fewer, num_kv_heads=heads, rows=batch)
    return bare_pair(models["target"], models["draft"], 0, mesh=mesh, draft_model_parallelism=fewer)


def draft_devices(config: ConfigDict, draft: TransformerConfig, count: int) -> int:
    """Returns how many of ``count`` devices hold one copy of the draft together."""
    return min(config.mesh.draft_model_parallelism or math.gcd(draft.num_heads, count), count)


def round_ms(pair: Pair, draft_length: int, batch: int, slots: int, repeats: int) -> Quartiles:
    """Returns the milliseconds of a round, nothing but the loop in them.

    Args:
      draft_length: K; 0 decodes plainly.
      slots: of the caches, about.
    """
    drafter = ModelDrafter(pair.draft, draft_length, decode_window()) if draft_length else NoDrafter()
    work = Workload(batch=batch, prompt_length=PROMPT, max_new_tokens=TOKENS, repeats=repeats)
    side = decoders(pair, {"it": (drafter, TokenRule())}, SAMPLING, work, least_length=max(slots - SPARE, 0))["it"]
    side.decode(0)  # compiles
    timings = [side.decode(repeat) for repeat in range(repeats)]
    return Quartiles.of(np.array([timing.loop_seconds / timing.rounds for timing in timings]) * 1e3)


def devices_here() -> str:
    """Names the devices at hand, for people."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"
