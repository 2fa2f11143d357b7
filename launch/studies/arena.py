"""Decodes the same weights with specsamp, Hugging Face transformers and llama.cpp, plain and speculative, in turn.

    pip install torch transformers llama-cpp-python gguf
    python launch/study.py arena --output=runs/arena.json

Target and draft have Llama's shape and are exported, in float32. Their weights are random around one chain of tokens that
both prefer, so that drafts are accepted about as often as good ones. Each engine has a thread for every core of this
process. llama.cpp verifies as its Python package does: a drafted token is kept if it is the token that the target samples.
The table of one shape, python_pair_transformers.json, is a dated record.
"""

import functools
import itertools
import os
import pathlib
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from safetensors.numpy import load_file

from launch.lib.study import Document, Option, Published, Study
from specsamp import ModelDrafter, NoDrafter, chain, load_pair, machine, temperature
from specsamp.analysis.report import Table
from specsamp.analysis.tables import band, ratio
from specsamp.analysis.workload import Quartiles, Workload, decoders, take_turns
from specsamp.checkpoints.export import export
from specsamp.checkpoints.public_pair import read_pair
from specsamp.decoding.method import Method
from specsamp.models import few_rows
from specsamp.models.config import TransformerConfig
from specsamp.models.transformer import TransformerLM

LLAMA = dict(vocab_size=2048, positions="rotary", gated=True, activation="silu", tied=False, max_positions=512)
SHAPES = {
    "target": dict(width=640, num_layers=7, num_heads=5, num_kv_heads=1, feedforward_width=2048),
    "draft": dict(width=256, num_layers=4, num_heads=4, num_kv_heads=1, feedforward_width=1024),
}
NOISE = {"target": 0.3, "draft": 0.1}  # times what random layers add to a token's embedding
CERTAINTY = 9.0  # the logit of the next token of the chain
PROMPT, NEW_TOKENS = 32, 48
TEMPERATURES = {"greedy": 0.0, "T = 0.8": 0.8}
PACKAGES = ("torch", "transformers", "llama_cpp_python", "gguf")
Run = Callable[[list[int], float, int], list[int]]  # prompt, temperature, new tokens -> their ids


def prepare(options: Any) -> None:
    """Refuses a machine without the other engines, before anything is written or read."""
    if missing := [name.replace("_", "-") for name in PACKAGES if machine.version(name) is None]:
        raise ValueError(f"the engines to compare with are not installed: pip install {' '.join(missing)}")


def write_models(folder: pathlib.Path) -> None:
    """Writes both models in the format of transformers, and as GGUF."""
    tokenizer, chained = load_pair("python").tokenizer, np.random.default_rng(0).permutation(LLAMA["vocab_size"])
    for number, (side, shape) in enumerate(SHAPES.items()):
        config = TransformerConfig(**LLAMA, **shape)
        params = jax.tree.map(np.array, TransformerLM(config).init(jax.random.key(number)))
        params["embedding"] = np.random.default_rng(number).normal(size=params["embedding"].shape).astype(np.float32)
        params["output_embedding"] = params["embedding"][chained] * np.float32(CERTAINTY / config.width)
        for layer in range(config.num_layers):
            params[f"layer_{layer}"]["mlp"]["down"] *= NOISE[side] * (2 * config.num_layers) ** 0.5
        export(str(folder / side), config, params, tokenizer)
        write_gguf(folder / side, config)


def write_gguf(folder: pathlib.Path, config: TransformerConfig) -> None:
    """Writes an exported model as GGUF, beside its folder; llama.cpp rotates neighbouring entries of queries and keys."""
    import gguf

    writer = gguf.GGUFWriter(f"{folder}.gguf", "llama")
    for name, value in {
        "context_length": config.max_positions,
        "embedding_length": config.width,
        "block_count": config.num_layers,
        "feed_forward_length": config.feedforward_width,
        "head_count": config.num_heads,
        "head_count_kv": config.num_kv_heads,
        "rope_dimension_count": config.head_size,
        "rope_freq_base": config.rotary_base,
        "layer_norm_rms_eps": config.norm_epsilon,
        "vocab_size": config.vocab_size,
        "tokenizer_model": "none",
    }.items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    for name, tensor in load_file(folder / "model.safetensors").items():
        if "q_proj" in name or "k_proj" in name:
            halves = tensor.reshape(-1, 2, config.head_size // 2, config.width)
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def transformers_runs(folder: pathlib.Path, K: int) -> dict[str, Run]:
    """Returns plain and assisted decoding by transformers."""
    import torch
    import transformers

    torch.set_num_threads(machine.cores())
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    target, draft = (load(folder / side).eval() for side in SHAPES)
    of_draft = dict(
        num_assistant_tokens=K, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    draft.generation_config.update(**of_draft)

    def run(assistant: dict[str, Any], prompt: list[int], T: float, count: int) -> list[int]:
        how = dict(do_sample=True, temperature=T, top_k=0, top_p=1.0) if T else dict(do_sample=False)
        tokens = torch.tensor([prompt])
        how |= dict(min_new_tokens=count, max_new_tokens=count, pad_token_id=0, attention_mask=torch.ones_like(tokens))
        with torch.inference_mode():
            return target.generate(tokens, **how, **assistant)[0, len(prompt) :].tolist()

    return {"plain": functools.partial(run, {}), "speculative": functools.partial(run, {"assistant_model": draft})}


def llama_runs(folder: pathlib.Path, K: int) -> dict[str, Run]:
    """Returns plain and speculative decoding by llama.cpp."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaDraftModel

    how = dict(n_ctx=LLAMA["max_positions"], n_threads=machine.cores(), n_threads_batch=machine.cores(), verbose=False)
    draft = Llama(f"{folder}/draft.gguf", **how)

    class Draft(LlamaDraftModel):
        def __call__(self, input_ids, /, **_):
            return np.array([*itertools.islice(draft.generate(input_ids.tolist(), temp=0.0), K)], np.intc)

    def run(model: Llama, prompt: list[int], T: float, count: int) -> list[int]:
        model.reset()  # reads the prompt anew, as the others do
        texts = model.generate(prompt, temp=T, top_k=0, top_p=1.0, min_p=0.0)
        return list(itertools.islice(texts, count))

    sides = {"plain": {}, "speculative": dict(draft_model=Draft(), logits_all=True)}
    return {side: functools.partial(run, Llama(f"{folder}/target.gguf", **how, **own)) for side, own in sides.items()}


def timed(run: Run, prompt: list[int], T: float) -> tuple[float, list[int]]:
    """Returns milliseconds per token after the first, which comes with the prompt's own pass, and the tokens."""
    run(prompt, T, 1)
    start = time.perf_counter()
    run(prompt, T, 1)
    middle = time.perf_counter()
    tokens = run(prompt, T, NEW_TOKENS + 1)
    return (time.perf_counter() - 2 * middle + start) / NEW_TOKENS * 1e3, tokens


def measure(options: Any, key: Any, say: Any) -> dict[str, Any]:
    """Decodes the prompts with every engine in turn, greedily and sampled."""
    few_rows.build()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, LLAMA["vocab_size"] - 1, PROMPT).tolist() for _ in range(options.prompts)]
    with tempfile.TemporaryDirectory() as folder:
        write_models(pathlib.Path(folder))
        pair = read_pair(f"{folder}/target", f"{folder}/draft", dtype="float32")
        theirs = {"transformers": transformers_runs(pathlib.Path(folder), options.K)}
        theirs["llama.cpp"] = llama_runs(pathlib.Path(folder), options.K)
    work = Workload(prompt_length=PROMPT, max_new_tokens=NEW_TOKENS + 1, prompts=tuple(map(tuple, prompts)))
    runs, emitted = {}, {}
    for name, T in TEMPERATURES.items():
        drafters = {"plain": NoDrafter(), "speculative": ModelDrafter(pair.draft, options.K)}
        methods = {side: Method(drafter=one, sampling=chain(temperature(T))) for side, one in drafters.items()}
        for side, decoder in decoders(pair, methods, work).items():

            def ours(turn: int, decoder=decoder, key=(name, side)) -> tuple[float, list[int]]:
                found = decoder.decode(turn)
                emitted.setdefault(key, []).append(found.stats.emitted_per_round)
                return found.loop_seconds / found.stats.emitted * 1e3, list(found.texts[0])

            runs[name, "specsamp", side] = ours
            for engine, sides in theirs.items():
                run = functools.partial(timed, sides[side], T=T)
                runs[name, engine, side] = lambda turn, run=run: run(prompt=prompts[turn])
    for number, run in enumerate(runs.values(), 1):
        say(f"warming up, {number} of {len(runs)}")
        run(0)
    answers = take_turns(runs, options.prompts, say)
    rows = []
    for (name, engine, side), found in answers.items():
        plain, own = (np.array([ms for ms, _ in answers[name, engine, of]]) for of in ("plain", side))
        row = {"sampling": name, "engine": engine, "side": side}
        row |= {"ms_per_token": Quartiles.of(own), "speedup": Quartiles.of(plain / own)}
        texts = zip(answers[name, "specsamp", "plain"], found)
        row["equal"] = None if TEMPERATURES[name] else sum(one[1] == other[1] for one, other in texts)
        rows.append(row | {"tokens_per_round": np.mean(emitted[name, side]) if engine == "specsamp" else None})
    return {
        "versions": {name: machine.version(name) for name in PACKAGES},
        "load_average": os.getloadavg()[0],
        "prompts": options.prompts,
        "K": options.K,
        "rows": rows,
    }


def table(document: Document) -> Table:
    """Returns a row for each engine and distribution."""
    rows = []
    for one, other in zip(
        *([row for row in document["rows"] if row["side"] == side] for side in ("plain", "speculative"))
    ):
        ms = [band(q["median"], (q["lower"], q["upper"]), 2) for q in (one["ms_per_token"], other["ms_per_token"])]
        equal = "" if other["equal"] is None else f"{one['equal']} and {other['equal']} of {document['prompts']}"
        rows.append((one["engine"], one["sampling"], *ms, ratio(other["speedup"]), equal))
    header = (
        "engine",
        "sampling",
        "plain, ms per token",
        "speculative",
        "speedup",
        "texts equal to specsamp's plain ones",
    )
    return Table(title="The same weights in three engines", header=header, rows=rows)


STUDY = Study(
    question="How fast is decoding beside Hugging Face transformers and llama.cpp, with the same weights?",
    options={
        "K": Option(4, "Tokens that are drafted per round.", least=1),
        "prompts": Option(10, "How many random prompts are decoded.", least=1),
    },
    prepare=prepare,
    measure=measure,
    tables={
        "arena": Published(["arena"], table),
    },
)
