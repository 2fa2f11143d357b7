"""Two checkpoints as a pair: mismatches are refused, padding is masked, stops are the target's."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import TransformerLM, generate, temperature
from specsamp.checkpoints import hugging_face, orbax
from specsamp.checkpoints.export import export
from specsamp.checkpoints.hugging_face import open_checkpoint
from specsamp.checkpoints.public_pair import differences, read_pair
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from support.checkpoint_shapes import CONFIG, edit, random_params, write_random_head
from support.refusals import refusal

DRAFT = dataclasses.replace(
    CONFIG, vocab_size=288, num_layers=1, feedforward_width=32, max_positions=256
)


@pytest.fixture(scope="session")
def draft_original(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("public") / "draft"
    export(folder, DRAFT, random_params(DRAFT, 1), tokenizer)
    return folder


@pytest.fixture
def draft(draft_original, tmp_path):
    return shutil.copytree(draft_original, tmp_path / "draft")


def refuse_to_read(monkeypatch):
    def refuse(*_):
        raise AssertionError("a tensor was looked at")

    monkeypatch.setattr(hugging_face, "find_tensors", refuse)


@pytest.mark.slow
def test_public_pair_never_writes_padding_tokens(original, draft, tokenizer):
    """The embeddings of target and draft have 304 and 288 rows, and the tokenizer 279 tokens."""
    said = []
    pair = read_pair(original, draft, dtype="float32", say=said.append)
    assert pair.target.vocab_size == pair.draft.vocab_size == 304
    assert (
        pair.target.config.num_real_tokens
        == pair.draft.config.num_real_tokens
        == tokenizer.vocab_size
        == 279
    )
    assert any("304 and 288 rows; both are masked beyond 279 tokens" in line for line in said)
    assert any("the draft reads 256 tokens, the target 512" in line for line in said)
    assert len(said) == 2
    completion = generate(
        pair, ["def f(x)"], 40, sampling=temperature(5.0), draft_length=3, stop=[]
    )[0]
    assert max(completion.tokens) < 279 and completion.stats.accepted > 0
    assert completion.text == tokenizer.decode(completion.tokens)
    # The models mask the padding without the tokenizer.
    for model, params in ((pair.target, pair.target_params), (pair.draft, pair.draft_params)):
        with jax.disable_jit():
            logits = model.forward(params, jnp.ones((1, 2), jnp.int32)).logits_BTV
        assert (logits[..., 279:] == -np.inf).all() and np.isfinite(logits[..., :279]).all()


def test_stop_tokens_are_the_targets_and_differences_reported(original, draft, tmp_path):
    target = shutil.copytree(original, tmp_path / "target")
    (target / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    said = []
    pair = read_pair(target, draft, dtype="float32", say=said.append)
    assert pair.stop == (7, 9, 278), "the tokenizer's own end of text ends one, too"
    assert any(
        "[7, 9, 278] in the target, which end a text, and [278] in the draft" in line
        for line in said
    )
    free = generate(pair, ["def"], 40, stop=[], sampling=temperature(5.0), draft_length=3)[0].tokens
    stop = free[5]
    ended = dataclasses.replace(pair, stop=(303, stop))
    completion = generate(ended, ["def"], 40, sampling=temperature(5.0), draft_length=3)[0]
    assert completion.finish == "stop" and completion.tokens == free[: free.index(stop) + 1]
    with refusal(r"stop\[0\].*got 304"):
        generate(dataclasses.replace(pair, stop=(304,)), ["def"], 4)


def swap_merges(content):
    merges = content["model"]["merges"]
    merges[3], merges[4] = merges[4], merges[3]


def swap_pieces(content):
    other = {269: 270, 270: 269}
    content["model"]["vocab"] = {
        name: other.get(index, index) for name, index in content["model"]["vocab"].items()
    }


def rename_added(content):
    content["added_tokens"][0]["content"] = "<end>"
    content["model"]["vocab"] = {
        ("<end>" if i == 278 else k): i for k, i in content["model"]["vocab"].items()
    }


@pytest.mark.parametrize(
    "change, message",
    [
        (swap_merges, r"differ in their merges, at merge 3: '.*' in the draft, '.*' in the target"),
        (swap_pieces, r"differ in their vocabulary, at id 269: '.*' in the draft"),
        (
            rename_added,
            r"differ in their vocabulary, at id 278: '<end>' in the draft, '<eos>' in the target",
        ),
    ],
    ids=["merges", "vocabulary", "added"],
)
def test_different_tokenizers_are_refused_before_reading(
    original, draft, change, message, monkeypatch
):
    edit(draft / "tokenizer.json", change)
    refuse_to_read(monkeypatch)
    with refusal(message):
        read_pair(original, draft)


def test_equal_tokenizers_in_other_formats_are_accepted(original, draft):
    """Merges are pairs or texts, a post-processor may be absent; another normalizer is reported."""
    assert len(differences(open_checkpoint(original), open_checkpoint(draft))) == 2

    def same(content):
        content["model"]["merges"] = [
            m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]
        ]
        content["post_processor"] = None

    edit(draft / "tokenizer.json", same)
    assert len(differences(open_checkpoint(original), open_checkpoint(draft))) == 2
    edit(draft / "tokenizer.json", lambda content: content.update(normalizer={"type": "NFC"}))
    assert any(
        "normalizers differ" in line
        for line in differences(open_checkpoint(original), open_checkpoint(draft))
    )


def test_added_tokens_without_embedding_are_reported(original, draft, tmp_path):
    """Gemma 3's text models have a placeholder for images: 262145 tokens for 262144 rows."""
    target = shutil.copytree(original, tmp_path / "target")
    edit(target / "config.json", lambda content: content.update(vocab_size=279))
    image = dict(id=279, content="<image>")
    edit(
        target / "tokenizer.json",
        lambda content: content["added_tokens"].append(content["added_tokens"][0] | image),
    )
    checkpoint = open_checkpoint(target)
    assert checkpoint.tokenizer.vocab_size == 279
    assert checkpoint.tokenizer.token_id("<image>") is None
    assert checkpoint.tokenizer.encode("x<image>") == open_checkpoint(original).tokenizer.encode(
        "x<image>"
    )
    said = differences(checkpoint, open_checkpoint(draft))
    assert f"{target} has no embedding of <image>: prompts cannot use them" in said
    assert len(said) == 3
    edit(
        target / "tokenizer.json",
        lambda content: content["model"]["vocab"].update({"<image>": 279}),
    )
    with refusal("280 tokens.* 279 rows"):
        open_checkpoint(target)


def test_damaged_draft_is_found_before_reading_the_target(original, draft, monkeypatch):
    (draft / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes()[:-9])
    monkeypatch.setattr(hugging_face.Tensor, "read", None)
    with refusal("draft/model.safetensors is damaged"):
        read_pair(original, draft)
    (draft / "tokenizer.json").unlink()
    with refusal("draft has no tokenizer.json"):
        read_pair(original, draft)


@pytest.fixture
def small_gigabytes(monkeypatch):
    """Sets a gigabyte to 10 kB: the embedding has 39 kB, which Orbax's limits must exceed."""
    handler = orbax.ocp.StandardCheckpointHandler

    def scaled(**limits):
        return handler(**{name: gb * 10_000 / 10**9 for name, gb in limits.items()})

    monkeypatch.setattr(orbax.ocp, "StandardCheckpointHandler", scaled)
    monkeypatch.setattr(orbax, "GB", 10_000)


def test_converted_checkpoint_is_equal_on_any_mesh(
    original, draft, params, tmp_path, small_gigabytes
):
    checkpoint = open_checkpoint(original, dtype="float32")
    mesh = make_mesh(2, 4)
    split = shard_model(TransformerLM(checkpoint.config), Layout.tensor_parallel(mesh))
    place = tmp_path / "converted"
    hugging_face.write_converted(checkpoint, hugging_face.read_params(checkpoint, split), place)
    again = open_checkpoint(place, dtype="float32")
    assert again.is_converted
    assert not checkpoint.is_converted
    assert again.stop_ids == checkpoint.stop_ids
    assert again.config == checkpoint.config
    whole = hugging_face.read_params(again, TransformerLM(again.config))
    jax.tree.map(np.testing.assert_array_equal, whole, params)
    wide = shard_model(
        TransformerLM(dataclasses.replace(again.config, vocab_size=320, dtype="bfloat16")),
        split.layout,
    )
    placed = hugging_face.read_params(again, wide)
    assert placed["embedding"].dtype == jnp.bfloat16
    assert placed["embedding"].sharding.num_devices == 8
    np.testing.assert_array_equal(
        placed["embedding"], np.pad(params["embedding"], ((0, 16), (0, 0))).astype(jnp.bfloat16)
    )
    pair = read_pair(place, draft, dtype="float32")
    assert pair.target.vocab_size == 304
    shutil.rmtree(place / "checkpoints/0/params")
    with refusal("converted/checkpoints/0 is damaged .*convert the checkpoint again"):
        hugging_face.read_params(again, TransformerLM(again.config))


@pytest.fixture
def head_folder(tmp_path):
    return write_random_head(tmp_path / "head", "org/a-target")


def test_public_head_leaves_the_text_unchanged(original, head_folder):
    said = []
    pair = read_pair(original, head_folder, is_head=True, dtype="float32", say=said.append)
    assert len(said) == 1 and "was trained for org/a-target" in said[0]
    assert not pair.head.config.own_embedding
    made, plain = (generate(pair, ["def f(x)"], 24, draft_length=K)[0] for K in (3, 0))
    assert made.tokens == plain.tokens and made.stats.drafted > 0


def test_head_of_another_target_is_refused_early(draft, head_folder):
    with refusal("vocab_size = 304, but the target's vocabulary is 288"):
        read_pair(draft, head_folder, is_head=True, dtype="float32")
