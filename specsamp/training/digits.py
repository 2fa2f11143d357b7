"""Writes images of handwritten digits as sequences of tokens, for a training without text:
configs/digits.py.

    python -m specsamp.training.digits runs/digits

The 1,797 images of 8 x 8 pixels come with scikit-learn (`pip install scikit-learn`). They are from
the UCI repository's "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, 1998;
CC BY 4.0). A sequence is the class, then the pixels row by row.
"""

import os
import sys

import numpy as np

from specsamp import storage
from specsamp.training.run_folder import write_array

SIDE, LEVELS, CLASSES = 8, 17, 10  # tokens 0 to 16 are grey levels, 17 to 26 classes
VOCAB_SIZE = LEVELS + CLASSES + 1  # the last token ends a sequence


def write_digits(folder: str | os.PathLike) -> np.ndarray:
    """Writes ``digits.npy``, uint8 ``[1797, 65]``, and returns it; raises ImportError without
    scikit-learn.
    """
    from sklearn.datasets import load_digits  # an extra: pip install scikit-learn

    digits = load_digits()
    tokens = np.concatenate([LEVELS + digits.target[:, None], digits.data], axis=1).astype(np.uint8)
    write_array(storage.place(folder) / "digits.npy", tokens)
    return tokens


def prompt(number: int) -> list[int]:
    """Returns the prompt for an image of a digit: the end of the sequence before it, and
    its class.
    """
    return [VOCAB_SIZE - 1, LEVELS + number]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("name one folder: python -m specsamp.training.digits runs/digits")
    print(f"{len(write_digits(sys.argv[1]))} images in {sys.argv[1]}/digits.npy")
