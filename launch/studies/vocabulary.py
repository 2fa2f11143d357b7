"""Measures what a draft model with another tokenizer accepts, beside one of the same size and training with the target's.

    python launch/train.py --config=configs/python_pair.py:target --workdir=runs/other --config.model.vocab_size=1024 SMALL
    python launch/train.py --config=configs/python_pair.py:target --workdir=runs/same --config.data.tokenizer=TOKENIZER SMALL
    python launch/study.py vocabulary --other=runs/other --same=runs/same --output=runs/python_vocabulary.json

SMALL: the fields that make a draft of the shipped target (width 128, 2 layers, 2 heads, feed-forward 512). TOKENIZER: the
tokenizer.json of the shipped pair.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from launch.lib.study import Document, Option, Published, Study, answers, law
from specsamp import ModelDrafter, Pair, TranslatingDrafter, chain, generate, load_pair, temperature, top_p
from specsamp.analysis.report import Table
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.checkpoints.trained_pair import load_prompts
from specsamp.checkpoints.vocabulary import match_vocabularies, shared_mass
from specsamp.models.transformer import TransformerLM
from specsamp.training.source import open_trained

PAIR, K, TOKENS = "python", 3, 128
LAWS = ({"temperature": 0.0, "top_p": 1.0}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "top_p": 1.0})


def measure(options: Any, key: dict, say: Callable[[str], None]) -> dict[str, Any]:
    """Returns tokens per round of each prompt, and what the vocabularies share."""
    run = open_trained(options.same if key["draft"] == "same" else options.other)
    model, ours = TransformerLM.for_backend(run.config), load_pair(PAIR)
    drafter, found = ModelDrafter(model, K), {}
    if key["draft"] != "same":
        vocabulary = match_vocabularies(ours.tokenizer, JsonTokenizer(run.folder / "tokenizer.json", "<eos>"))
        drafter = TranslatingDrafter(model, vocabulary, K)
        texts = [ours.tokenizer.encode(prompt) for prompt in load_prompts(PAIR)]
        found = {
            "shared_tokens": vocabulary.num_shared,
            "target_tokens": len(vocabulary.draft_ids_V),
            "most_ids": vocabulary.reading_VM.shape[1],
            "shared_mass": shared_mass(model, run.params, vocabulary, texts),
        }
    pair = Pair(
        target=ours.target,
        target_params=ours.target_params,
        draft=model,
        draft_params=run.params,
        tokenizer=ours.tokenizer,
        vocabulary=getattr(drafter, "vocabulary", None),
    )
    how = {"sampling": chain(temperature(key["temperature"]), top_p(key["top_p"])), "drafter": drafter}
    texts = generate(pair, load_prompts(PAIR), TOKENS, num_samples=1 if key["temperature"] == 0 else 4, **how)
    return {"step": run.step, **found, "tokens_per_round": [text.stats.emitted_per_round for text in texts]}


def table(document: Document) -> Table:
    """Returns a row for each draft and distribution."""
    rows = []
    for key, result in answers(document):
        low, middle, high = np.quantile(result["tokens_per_round"], (0.25, 0.5, 0.75))
        shared = "all"
        if "shared_tokens" in result:
            shared = f"{result['shared_tokens']} of {result['target_tokens']}, {result['shared_mass']:.1%} of the mass"
        rows.append((f"{key['draft']} tokenizer", law(key), f"{middle:.2f} ({low:.2f} to {high:.2f})", shared))
    header = ("draft", "sampling", "tokens per round", "shared with the target")
    return Table(title="A draft with another tokenizer", header=header, rows=rows)


STUDY = Study(
    question="How much less is accepted of a draft model that has another tokenizer than its target?",
    options={
        "other": Option("", "Folder of the run of the draft with another tokenizer."),
        "same": Option("", "Folder of the run of the draft with the target's tokenizer."),
    },
    cells=lambda options: [{"draft": draft, **law} for draft in ("same", "other") for law in LAWS],
    identity=lambda options: {"pair": PAIR, "K": K, "max_new_tokens": TOKENS},
    measure=measure,
    tables={"vocabulary": Published(["python_vocabulary"], table)},
)
