"""Measures all that can draft for one target on the same held-out prompts, each in turn with plain decoding.

    python launch/study.py drafters --output=runs/python_drafters.json
    python launch/study.py drafters --head=Medusa=runs/medusa_head --output=runs/python_drafters.json

The draft model of a pair, prompt lookup, an early exit and the pair's head; --head adds heads that launch/export.py wrote.
An early exit of the pair's own target, which was not trained for it, is hardly accepted: --exit_target names the run of
one that was, whose texts are its own.

A draft's cost is what proposing and reading what was accepted take for each drafted token, in steps of the target.
"Accepted at" a position: of the rounds that came so far.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import Any

from launch.lib.study import Document, Key, Option, Published, Study, law
from specsamp import chain, temperature, top_p, use_compilation_cache
from specsamp.analysis.benchmark import Result, benchmark
from specsamp.analysis.report import Table
from specsamp.analysis.tables import ratio
from specsamp.analysis.workload import Workload
from specsamp.checkpoints.heads import open_head, read_head
from specsamp.checkpoints.pair import load_pair, load_prompts, pair_folder
from specsamp.checkpoints.params import digest_of_pair
from specsamp.decoding import drafters as kinds
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.loop import decode_window
from specsamp.decoding.method import Method
from specsamp.decoding.pair import Pair
from specsamp.decoding.request import encode
from specsamp.models.heads import FeatureHead
from specsamp.models.transformer import TransformerLM
from specsamp.training.source import open_target

SAMPLINGS = {"greedy": (0.0, 1.0), "0.8/0.95": (0.8, 0.95), "1.0": (1.0, 1.0)}  # temperature and top-p
OPTIONS = {
    "pair": Option("python", "The pair, by name or folder."),
    "head": Option((), "More heads of its target, as NAME=FOLDER, with commas between them."),
    "exit_target": Option(None, "The run of a target that was trained for early exit; default the pair's own target."),
    "exit_layer": Option(2, "Layers of the target that draft in an early exit.", least=1),
    "K": Option((1, 2, 4), "Draft lengths, with commas between them.", least=1),
    "prompt_count": Option(16, "Decode the first so many held-out prompts of the pair.", least=1),
    "max_new_tokens": Option(128, "Tokens that each prompt is continued by.", least=1),
    "sampling": Option(tuple(SAMPLINGS), "Distributions, with commas between them.", choices=tuple(SAMPLINGS)),
}


def prepare(options: Any) -> None:
    """Adds the drafters and the prompts."""
    options.sources = sources_of(options)
    tokens = tuple(map(tuple, encode(load_pair(options.pair), load_prompts(options.pair)[: options.prompt_count])))
    sizes = {"prompt_length": max(map(len, tokens)), "max_new_tokens": options.max_new_tokens, "repeats": len(tokens)}
    options.work = Workload(prompts=tokens, **sizes)
    use_compilation_cache()


def sources_of(options: Any) -> dict[str, tuple[Pair, Callable[[int], Drafter]]]:
    """Returns a pair and its drafter of K by name; refuses a pair, head or run that is not there or does not fit."""
    pair, window = load_pair(options.pair), decode_window()
    sources = {
        "draft model": (pair, lambda K: kinds.ModelDrafter(pair.draft, K, window)),
        "prompt lookup": (pair, lambda K: kinds.NgramDrafter(K=K)),
    }
    exits, name = pair, f"early exit after {options.exit_layer}"
    if options.exit_target:
        own, name = open_target(options.exit_target), f"{name} (trained for it)"
        model = TransformerLM.for_backend(dataclasses.replace(own.config, dtype=pair.target.config.dtype))
        exits = dataclasses.replace(pair, target=model, target_params=own.params)
    leave = functools.partial(kinds.EarlyExitDrafter, exits.target, options.exit_layer, window=window)
    leave(1)  # refuses a layer that the target does not have
    sources[name] = exits, leave
    with_heads = {}
    if (pair_folder(options.pair) / "head").is_dir():
        with_heads["its head"] = load_pair(options.pair, draft="head")
    for text in options.head:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise ValueError(f"--head={text}: write a name and a folder, such as Medusa=runs/medusa_head")
        checkpoint = open_head(folder, pair.target.config, dtype=pair.target.config.dtype)
        parts = {"head": FeatureHead(checkpoint.config), "draft": None}
        parts["draft_params"] = read_head(checkpoint, parts["head"])
        with_heads[name if "head" in name else f"{name} head"] = dataclasses.replace(pair, **parts)
    for name, one in with_heads.items():
        sources[name] = one, functools.partial(kinds.FeatureDrafter, one.target, one.head, window=window)
    return sources


def cells(options: Any) -> list[dict[str, Any]]:
    """Returns a key for each drafter, K and distribution; other weights are other cells."""
    keys = []
    for name, (pair, _) in options.sources.items():
        constant = {"rule": "token", "batch": 1, "top_k": 0, "min_p": 0.0, "weights": digest_of_pair(pair)}
        most = pair.head and pair.head.config.max_tokens  # None: any number
        for K in (K for K in options.K if most is None or K <= most):
            for heat, share in (SAMPLINGS[word] for word in options.sampling):
                keys.append({"drafter": name, "draft_length": K, "temperature": heat, "top_p": share, **constant})
    return keys


def identity(options: Any) -> dict[str, Any]:
    """Returns what all cells of a file share."""
    prompts = {"count": len(options.work.prompts), "crc32": zlib.crc32(repr(options.work.prompts).encode())}
    return {"pair": options.pair, "prompts": prompts, "max_new_tokens": options.max_new_tokens}


def measure(options: Any, key: Key, say: Callable[[str], None]) -> Result:
    """Measures a drafter beside plain decoding in turn."""
    pair, make = options.sources[key["drafter"]]
    sampling = chain(temperature(key["temperature"]), top_p(key["top_p"]))
    return benchmark(pair, Method(drafter=make(key["draft_length"]), sampling=sampling), options.work, say)


def drafters(document: Document) -> Table:
    """Returns what each drafter of one target gains, by distribution and K."""
    most, rows = max(cell["key"]["draft_length"] for cell in document["cells"]), []
    for cell in document["cells"]:
        key, cost = cell["key"], ""
        named = key["drafter"], law(key), f"{key['draft_length']}"
        if "result" not in cell:
            rows.append((*named, "out of memory", *[""] * (most + 3)))
            continue
        result, split, counts = cell["result"], cell["result"]["split"], cell["result"]["acceptance"]
        shares = ["" if share is None else f"{share:.2f}" for share in counts["by_position"]]
        shares += [""] * (most - len(shares))
        if split is not None:
            spent = sum(split[part]["ms"]["median"] for part in ("draft", "commit"))
            cost = f"{spent / (key['draft_length'] * split['step']['ms']['median']):.2f}"
        ms = f"{result['speculative']['ms_per_token']['median']:.2f}"
        gained = ratio(result["speedup"])
        rows.append((*named, f"{counts['emitted'] / counts['rounds']:.2f}", *shares, cost, ms, gained))
    positions = [f"accepted at {i + 1}" for i in range(most)]
    header = (
        "drafter",
        "sampling",
        "K",
        "tokens per round",
        *positions,
        "a draft, in steps",
        "ms per token",
        "speedup",
    )
    return Table(title="Drafters of one target, on the same prompts", header=header, rows=rows)


STUDY = Study(
    question="What does each drafter of one target gain, and at which cost?",
    options=OPTIONS,
    prepare=prepare,
    cells=cells,
    identity=identity,
    measure=measure,
    tables={
        "drafters": Published(["python_drafters"], drafters),
    },
)
