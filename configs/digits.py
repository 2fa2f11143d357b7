"""Trains a pair that draws handwritten digits pixel by pixel: sequences of integers, no text and no
tokenizer.

    python -m specsamp.training.digits runs/digits      # the images, with scikit-learn
    python launch/train.py --config=configs/digits.py:target --workdir=runs/digits_target
    python launch/train.py --config=configs/digits.py:draft --workdir=runs/digits_draft \\
        --config.target=runs/digits_target
    python launch/export.py --target=runs/digits_target --draft=runs/digits_draft \\
        --output=runs/digits_pair

Any folder of ``.npy`` files with integers is trained on like this one:
`specsamp.training.data.read_corpus`.
"""

from ml_collections import ConfigDict

from configs import python_pair

VOCAB_SIZE = 28  # 17 grey levels, 10 classes, the end: specsamp/training/digits.py


def get_config(kind: str = "target") -> ConfigDict:
    if kind not in ("target", "draft"):
        raise ValueError(f"no {kind!r} in configs/digits.py: choose target or draft")
    config = python_pair.get_config(kind)
    is_draft = kind == "draft"
    config.data.update(
        folder="runs/digits",
        pattern="*.npy",
        exclude=(),
        held_out=0.1,
        length=132,  # two images
        held_out_windows=64,
    )
    config.model.update(
        vocab_size=VOCAB_SIZE,
        width=64 if is_draft else 128,
        num_layers=1 if is_draft else 4,
        feedforward_width=256 if is_draft else 512,
        max_positions=256,
    )
    config.train.update(steps=1500, learning_rate=3e-3 if is_draft else 2e-3)
    config.intervals.evaluate = 300
    if is_draft:
        config.model.ngram_rows = 0
        config.generated.update(
            rows=512,
            prompt_length=2,  # the end of an image, and the next one's class
            temperature=1.0,
            top_p=1.0,
            greedy_share=0.0,
        )
    return config
