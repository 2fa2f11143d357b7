"""Counts the rounds of rollouts: several completions of each prompt, in two epochs.

    python launch/study.py rollouts --output=runs/python_ngram_rollouts.json

The policy, the target of the shipped pair, is the same in both epochs. Logs are of the completions
that are decoded beside and before a completion; the corpus is the first epoch.
"""

from typing import Any

from launch.lib.study import Document, Published, Say, Study
from specsamp import ModelDrafter, NgramDrafter, generate_many, temperature, validate
from specsamp.analysis.report import Table
from specsamp.checkpoints.trained_pair import load_pair, load_prompts

PAIR, K, SAMPLES, BUDGET = "python", 4, 8, 96
PROMPT = 64  # tokens
TEMPERATURES = (1.0, 0.7)


def measure(options: Any, say: Say) -> dict[str, Any]:
    """Decodes the second epoch with each drafter, all completions of a prompt together."""
    pair = load_pair(PAIR)
    texts = load_prompts(PAIR)[: validate.integer("--prompts", options.prompts, 1)]
    prompts = [pair.tokenizer.encode(text)[:PROMPT] for text in texts]
    rows = []
    for degree in TEMPERATURES:

        def decode(epoch: int, drafter: Any) -> list[Any]:
            say(f"temperature {degree:g}, epoch {epoch}, {drafter!r:.40}")
            queue = generate_many(
                pair,
                prompts,
                BUDGET,
                rows=SAMPLES,
                num_samples=SAMPLES,
                seed=epoch,
                sampling=temperature(degree),
                drafter=drafter,
            )
            return list(queue)

        model = ModelDrafter(pair.draft, K)
        first = decode(1, model)
        corpus = [one.tokens for one in first]
        log = SAMPLES * BUDGET
        drafters = {
            "the draft model": model,
            "the own text": NgramDrafter(K),
            "and logs": NgramDrafter(K, log=log),
            "and the first epoch": NgramDrafter(K, corpus=corpus),
            "and both": NgramDrafter(K, corpus=corpus, log=log),
        }
        for name, drafter in drafters.items():
            found = decode(2, drafter)
            rounds = sum(one.stats.rounds for one in found)
            tokens = sum(len(one.tokens) for one in found)
            rows.append(
                {"temperature": degree, "drafter": name, "rounds": rounds, "tokens": tokens}
            )
    return {"pair": PAIR, "K": K, "samples": SAMPLES, "rows": rows}


def rounds_table(document: Document) -> Table:
    """Returns tokens per round, by drafter and temperature."""
    shown: dict[str, dict[str, str]] = {}
    for row in document["rows"]:
        line = shown.setdefault(row["drafter"], {"drafts from": row["drafter"]})
        line[f"T = {row['temperature']:g}"] = f"{row['tokens'] / row['rounds']:.2f}"
    return Table.of("Tokens per round", list(shown.values()))


STUDY = Study(
    question="How many rounds do earlier rollouts spare?",
    measure=measure,
    options={"prompts": (12, "Number of prompts, each with eight completions.")},
    tables={"rollouts": Published(["python_ngram_rollouts"], rounds_table)},
)
