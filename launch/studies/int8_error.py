"""Measures what int8 weights and caches change: logits, held-out loss and acceptance, beside the same models in float.

    python launch/studies/int8_error.py --output=runs/int8_error.json

Texts are the held-out prompts of a pair, each read in one call. The weights of a pair in a folder are stored in int8: decoding
with them changes nothing that storing has not, which its pair.json tells. What rounding does to weights that were never
rounded is shown on random ones of the shape of configs/random_pair.py:38m.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from launch.lib import entry
from specsamp import storage
from specsamp.checkpoints.pair import load_pair, load_prompts, pair_folder
from specsamp.models.config import target_38m
from specsamp.models.int8 import SIDES, Int8
from specsamp.models.transformer import TransformerLM

_PAIR = flags.DEFINE_string("pair", "python", "The pair to measure, by its name or folder.")
_TOKENS = flags.DEFINE_integer("tokens", 64, "How many tokens of each prompt are read.", lower_bound=2)
_OUTPUT = entry.define_output()

SETTINGS = {
    "float32": Int8(),
    "int8 weights": Int8(weights=SIDES),
    "int8 caches": Int8(caches=SIDES),
    "int8 weights and caches": Int8(weights=SIDES, caches=SIDES),
}


def main() -> None:
    console = entry.make_console()
    entry.check_output(_OUTPUT.value)
    plain = load_pair(_PAIR.value)
    texts = [plain.tokenizer.encode(text)[: _TOKENS.value] for text in load_prompts(_PAIR.value)]
    tokens_BT = jnp.asarray([text for text in texts if len(text) == _TOKENS.value], jnp.int32)
    if not tokens_BT.size:
        raise ValueError(f"--tokens={_TOKENS.value}: no prompt of {_PAIR.value} is so long")
    of_pair, of_random = {}, {}
    for name, int8 in SETTINGS.items():
        console.print(name)
        pair = plain if name == "float32" else load_pair(_PAIR.value, int8=int8)
        of_pair[name] = [read(getattr(pair, side), getattr(pair, f"{side}_params"), tokens_BT) for side in SIDES]
        config = dataclasses.replace(target_38m(), **int8.of("target"))
        model = TransformerLM.for_backend(config)
        of_random[name] = read(model, _random_params(config.vocab_size), tokens_BT % config.vocab_size)
    first = of_pair["float32"]
    result = {
        "texts": len(tokens_BT),
        "tokens": _TOKENS.value,
        "stored": {
            precision: {side: numbers(held_out[side]) for side in SIDES}
            for precision, held_out in storage.read_json(pair_folder(_PAIR.value) / "pair.json")["provenance"][
                "held_out"
            ].items()
        },
        "pair": {
            name: {"target": against(logits[0], first[0], tokens_BT)}
            | {"draft": against(logits[1], first[1], tokens_BT), "acceptance": acceptance(*logits)}
            for name, logits in of_pair.items()
        },
        "random weights": {name: against(logits, of_random["float32"], None) for name, logits in of_random.items()},
    }
    for name, found in result["pair"].items():
        console.print(name, found)
    console.print(result["random weights"])
    entry.write_result(_OUTPUT.value, result, console)


def numbers(fields: dict) -> dict[str, float]:
    return {name: value for name, value in fields.items() if isinstance(value, float)}


@functools.cache
def _random_params(vocab_size: int):
    return TransformerLM(target_38m(vocab_size=vocab_size)).init(jax.random.key(0))


def read(model: TransformerLM, params, tokens_BT: jax.Array) -> np.ndarray:
    """Returns logits ``[B, T, V]`` of texts that are read into an empty cache in one call."""
    batch, length = tokens_BT.shape
    weights = model.prepare(params)
    call = jax.jit(model.__call__, compiler_options=dict(model.compiler_options) or None)
    logits_BTV = [
        call(weights, tokens_BT[b : b + 1], jnp.zeros((1,), jnp.int32), model.init_cache(1, length)).logits_BTV
        for b in range(batch)
    ]
    return np.concatenate(logits_BTV)


def against(logits_BTV: np.ndarray, plain_BTV: np.ndarray, tokens_BT: jax.Array | None) -> dict[str, float]:
    """Returns how far logits and their distributions are from those in float, and the loss of texts if there are any."""
    ours, theirs = (np.asarray(jax.nn.log_softmax(x.astype(np.float64), axis=-1)) for x in (logits_BTV, plain_BTV))
    differ = logits_BTV - plain_BTV
    found = {
        "logits, rms of the difference": float(np.sqrt(np.mean(differ**2))),
        "logits, largest difference": float(np.abs(differ).max()),
        "logits, standard deviation": float(plain_BTV.std(axis=-1).mean()),
        "divergence, nats": float((np.exp(theirs) * (theirs - ours)).sum(-1).mean()),
        "same likeliest token": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
    }
    if tokens_BT is not None:
        of_next = np.take_along_axis(ours[:, :-1], np.asarray(tokens_BT)[:, 1:, None], axis=-1)
        found["loss, nats per token"] = float(-of_next.mean())
    return found


def acceptance(target_BTV: np.ndarray, draft_BTV: np.ndarray) -> float:
    """Returns the chance that a token drawn from the draft at temperature 1 is accepted, after these texts' own tokens."""
    p, q = (np.asarray(jax.nn.softmax(x.astype(np.float64), axis=-1)) for x in (target_BTV, draft_BTV))
    return float(np.minimum(p, q).sum(-1).mean())


if __name__ == "__main__":
    entry.run(main)
