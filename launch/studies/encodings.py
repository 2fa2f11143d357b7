"""Measures what it costs a draft with another tokenizer that it reads the target's tokens one by one.

    python launch/train.py --config=configs/python_pair.py:target --workdir=runs/other --config.model.vocab_size=1024 SMALL
    python launch/study.py encodings --other=runs/other --output=runs/python_encodings.json

SMALL: the fields that make a draft of the shipped target (width 128, 2 layers, 2 heads, feed-forward 512). After each token
of texts of the target, the draft's distribution is computed twice: on the draft ids of each target token, as
`TranslatingDrafter` reads them, and on the draft's own encoding of the same text. Acceptance is the overlap of either with the
target's distribution, at T = 1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.lib.study import Document, Option, Published, Study
from specsamp import chain, generate, load_pair, temperature
from specsamp.analysis.report import Table
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.checkpoints.trained_pair import load_prompts
from specsamp.checkpoints.vocabulary import match_vocabularies
from specsamp.decoding.drafters.translating import restrict
from specsamp.models.transformer import TransformerLM
from specsamp.training.source import open_trained

PAIR, TOKENS, ROOM, ROWS = "python", 128, 512, 32


def last_laws(model: Any, params: Any) -> Callable[[list[list[int]]], np.ndarray]:
    """Returns a function from texts of ids to the logits behind each."""
    weights = model.fit_slots(model.prepare(params), ROOM)

    @jax.jit
    def call(ids_BT, lengths_B):
        output = model(weights, ids_BT, jnp.zeros(ROWS, jnp.int32), model.init_cache(ROWS, ROOM))
        return jnp.take_along_axis(output.logits_BTV, lengths_B[:, None, None] - 1, axis=1)[:, 0]

    def laws(texts):
        found = []
        for start in range(0, len(texts), ROWS):
            some = texts[start : start + ROWS]
            ids_BT, lengths_B = np.zeros((ROWS, ROOM), np.int32), np.ones(ROWS, np.int32)
            for row, ids in enumerate(some):
                ids_BT[row, : len(ids)], lengths_B[row] = ids, len(ids)
            found.append(call(ids_BT, lengths_B)[: len(some)])
        return jnp.concatenate(found).astype(jnp.float32)

    return laws


def measure(options: Any, key: dict, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns the mean acceptance on both encodings, with the standard error of their difference over texts."""
    run, ours = open_trained(options.other), load_pair(PAIR)
    theirs = JsonTokenizer(run.folder / "tokenizer.json", "<eos>")
    vocabulary = match_vocabularies(ours.tokenizer, theirs)
    draft, target = (
        last_laws(TransformerLM.for_backend(run.config), run.params),
        last_laws(ours.target, ours.target_params),
    )
    prompts, per_text, same = load_prompts(PAIR), [], []
    for prompt, done in zip(prompts, generate(ours, prompts, TOKENS, sampling=chain(temperature(1.0)))):
        begun = ours.tokenizer.encode(prompt)
        contexts = [[*begun, *done.tokens[:count]] for count in range(1, len(done.tokens))]
        read = [[*vocabulary.begin, *vocabulary.read(context)] for context in contexts]
        own = [theirs.encode(ours.tokenizer.decode(context)) for context in contexts]
        q_NV = jax.nn.softmax(target(contexts))
        shared = [jax.nn.softmax(restrict(draft(ids), vocabulary.draft_ids_V)) for ids in (read, own)]
        per_text.append([float(jnp.minimum(q_NV, p_NV).sum(-1).mean()) for p_NV in shared])
        same += [a == b for a, b in zip(read, own)]
    per_text = np.array(per_text)
    error = np.std(per_text[:, 1] - per_text[:, 0], ddof=1) / len(per_text) ** 0.5
    means = dict(zip(("token_by_token", "own_encoding"), per_text.mean(0).tolist()))
    return {
        "step": run.step,
        "same_ids": float(np.mean(same)),
        "acceptance": means,
        "error_of_difference": float(error),
    }


def table(document: Document) -> Table:
    """Returns the acceptance on both encodings."""
    rows = [
        {"the draft reads": name.replace("_", " "), "acceptance": f"{x:.4f}"}
        for name, x in document["acceptance"].items()
    ]
    return Table.of("Encodings of a draft with another tokenizer", rows)


STUDY = Study(
    question="What does it cost that a draft reads the target's tokens one by one, instead of its own encoding of the text?",
    options={"other": Option("", "Folder of the run of a draft with another tokenizer.")},
    identity=lambda options: {"pair": PAIR, "max_new_tokens": TOKENS},
    measure=measure,
    tables={"encodings": Published(["python_encodings"], table)},
)
