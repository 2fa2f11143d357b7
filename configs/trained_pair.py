"""Describes a trained pair and its held-out prompts.

    python launch/demo.py --config=configs/trained_pair.py
    python launch/benchmark.py --config=configs/trained_pair.py:python --config.rule=block
    python launch/benchmark.py --config=configs/trained_pair.py:runs/my_pair --config.draft_length=6
    python launch/benchmark.py --sweep --config=configs/trained_pair.py \\
        --output=runs/python_pair_grid.json

After the colon comes a pair of the package, or a folder (launch/export.py writes one).
"""

from ml_collections import ConfigDict

from configs import common


def get_config(pair: str = "python") -> ConfigDict:
    # K = 3 is best on two cores for greedy and sampled text together.
    return common.add_decoding(
        ConfigDict({"pair": pair}),
        draft_length=3,
        prompt_length=96,
        max_new_tokens=128,
        repeats=20,
    )


GRIDS = [  # for launch/benchmark.py --sweep
    (
        "sampling.temperature=0.0,0.8,1.0",
        "draft_length=0,1,2,4,8",
        "rule=token,block",
        "drafter=model,ngram",
    ),
    # A draft that is hotter or colder than its target.
    ("draft_temperature=0.0,0.4,0.6,0.8,1.0,1.2", "draft_length=4"),
]
