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
    config.data.folder = "runs/digits"
    config.data.pattern = "*.npy"
    config.data.exclude = ()
    config.data.held_out = 0.1
    config.data.length = 132  # two images
    config.data.held_out_windows = 64
    config.model.vocab_size = VOCAB_SIZE
    config.model.width = 64 if kind == "draft" else 128
    config.model.num_layers = 1 if kind == "draft" else 4
    config.model.feedforward_width = 256 if kind == "draft" else 512
    config.model.max_positions = 256
    config.train.steps = 1500
    config.train.learning_rate = 3e-3 if kind == "draft" else 2e-3
    config.intervals.evaluate = 300
    if kind == "draft":
        config.model.ngram_rows = 0
        config.generated.rows = 512
        config.generated.prompt_length = 2  # the end of an image, and the next one's class
        config.generated.temperature = 1.0
        config.generated.top_p = 1.0
        config.generated.greedy_share = 0.0
    return config
