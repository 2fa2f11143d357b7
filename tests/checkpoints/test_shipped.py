"""The pair that comes with the package, a draft of its own target; and the head of SmolLM2, whose
target does not come.
"""

import json

import pytest

from configs import hf
from specsamp import generate, greedy, load_pair
from specsamp.checkpoints.hub import ASSETS, find_folder
from specsamp.checkpoints.public_heads import open_head, read_head
from specsamp.checkpoints.trained_pair import load_prompts
from specsamp.models.config import TransformerConfig


@pytest.fixture(scope="module")
def pair():
    return load_pair("python")


def test_its_greedy_text_does_not_depend_on_the_draft(pair):
    prompt = load_prompts("python")[1:2]
    plain, drafted = (
        generate(pair, prompt, 24, sampling=greedy(), draft_length=K)[0] for K in (0, 3)
    )
    assert plain.tokens == drafted.tokens and drafted.stats.acceptance_rate > 0.4


@pytest.fixture(scope="module")
def head_pair():
    return load_pair("python", draft="head")


@pytest.mark.slow
def test_greedy_text_does_not_depend_on_the_head_and_it_drafts(head_pair, pair):
    prompt = load_prompts("python")[1:2]
    plain, drafted = (
        generate(head_pair, prompt, 24, sampling=greedy(), draft_length=K)[0] for K in (0, 3)
    )
    assert plain.tokens == drafted.tokens and drafted.stats.rounds <= 16


FOLDER = ASSETS / "smollm2-head"
TARGET = TransformerConfig(
    vocab_size=49_152,
    width=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    feedforward_width=1536,
    max_positions=8192,
    positions="rotary",
    rotary_base=100_000.0,
    gated=True,
    activation="silu",
)


def test_its_file_is_a_head_of_its_target():
    """What such a file computes is compared with the package speculators, in test_heads.py."""
    checkpoint = open_head("smollm2-head", TARGET, dtype="float32")
    head = checkpoint.config.head()
    assert head.hidden_layers == (1, 14, 26) and head.config.draft_vocab_size == 8192
    assert head.config.layer.rotary_base == 100_000.0
    assert read_head(checkpoint, head)


def test_its_name_is_a_folder_of_the_package_and_its_files_name_its_target():
    assert find_folder("smollm2-head") == (FOLDER, False)
    pair = hf.find("smollm2")
    verifier = json.loads((FOLDER / "config.json").read_text())["speculators_config"]["verifier"]
    assert (pair.draft, pair.target) == ("smollm2-head", verifier["name_or_path"])
