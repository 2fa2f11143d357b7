"""Reads two public checkpoints as a pair, or a checkpoint and a head, after checking that they belong together."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from specsamp.checkpoints.heads import open_head, read_head
from specsamp.checkpoints.hugging_face import Checkpoint, OnProgress, check_readable, open_checkpoint, read_params
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.decoding.data_shards import DataShards
from specsamp.decoding.pair import Pair
from specsamp.mesh.layout import MODEL, REPLICA, Layout
from specsamp.mesh.sharded import draft_layout, shard_model
from specsamp.mesh.sharded_head import shard_head
from specsamp.models.config import TransformerConfig
from specsamp.models.heads import FeatureHead, HeadConfig
from specsamp.models.int8 import FLOAT, Int8
from specsamp.models.interface import LanguageModel
from specsamp.models.transformer import TransformerLM


def read_pair(
    target: str,
    draft: str,
    *,
    dtype: str = "bfloat16",
    int8: Int8 = FLOAT,
    mesh: Mesh | None = None,
    draft_model_parallelism: int | None = None,
    progress: OnProgress = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
    check: Callable[[LanguageModel, LanguageModel], Any] = lambda *_: None,
) -> Pair:
    """Reads a pair of two checkpoints, ready for `generate`.

    Args:
      target, draft: folders, ``gs://`` folders or ids of the hub; or what launch/export.py made of them.
      dtype: of weights, activations and caches.
      int8: what is in int8 instead; weights are quantised while they are read.
      mesh, draft_model_parallelism: see `specsamp.mesh.sharded.shard`; None leaves both models on one device.
      say: is told where the two differ without harm.
      check: is shown target and draft before any weight is read, and raises ValueError if they will not do.

    Raises:
      FileNotFoundError, ValueError: a checkpoint cannot be read, see `open_checkpoint`, or the two do not belong
        together, see `differences`: before any weight is read.
    """
    sides = {"target": target, "draft": draft}
    checkpoints = [open_checkpoint(name, dtype=dtype, **int8.of(side)) for side, name in sides.items()]
    for difference in differences(*checkpoints):
        say(difference)
    models = [TransformerLM.for_backend(config) for config in padded_configs(*checkpoints, multiple=_devices(mesh))]
    if mesh is not None:
        layouts = Layout.tensor_parallel(mesh), draft_layout(mesh, draft_model_parallelism)
        models = [shard_model(model, layout) for model, layout in zip(models, layouts)]
    check(*models)
    for checkpoint, model in zip(checkpoints, models):
        check_readable(checkpoint, model)
    params = [read_params(checkpoint, model, progress) for checkpoint, model in zip(checkpoints, models)]
    return Pair(
        target=models[0],
        target_params=params[0],
        draft=models[1],
        draft_params=params[1],
        tokenizer=checkpoints[0].tokenizer,
        stop=checkpoints[0].stop_ids or None,
        shards=DataShards(mesh),
    )


def read_head_pair(
    target: str,
    head: str,
    *,
    dtype: str = "bfloat16",
    int8: Int8 = FLOAT,
    mesh: Mesh | None = None,
    draft_model_parallelism: int | None = None,
    progress: OnProgress = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
    check: Callable[[LanguageModel, FeatureHead], Any] = lambda *_: None,
    check_fit: Callable[[Pair], Any] | None = None,
) -> Pair:
    """Reads a target and a head that drafts from its hidden states, ready for `generate`.

    Args:
      target, head: folders, ``gs://`` folders or ids of the hub.
      dtype, int8, mesh, draft_model_parallelism, progress: see `read_pair`.
      say: is told if the head was trained for another model of the same sizes.
      check: is shown target and head before any weight is read, and raises ValueError if they will not do.
      check_fit: is called with the pair, such as `specsamp.evaluation.head_check.warn_unless_it_fits`.

    Raises:
      FileNotFoundError, ValueError: see `open_checkpoint` and `open_head`: before any weight is read.
    """
    checkpoint = open_checkpoint(target, dtype=dtype, **int8.of("target"))
    embedding = None if checkpoint.is_converted else checkpoint.tensors[checkpoint.sources()["embedding"].tensor]
    opened = open_head(head, checkpoint.config, target_embedding=embedding, dtype=dtype)
    for note in opened.notes(checkpoint.name):
        say(note)
    check_head_of(checkpoint, opened.config, opened.name)
    devices = _devices(mesh)
    rows = -(-checkpoint.config.vocab_size // devices) * devices
    real = checkpoint.require_tokenizer().vocab_size
    model = TransformerLM.for_backend(
        dataclasses.replace(checkpoint.config, vocab_size=rows, num_real_tokens=min(real, rows))
    )
    layer = dataclasses.replace(opened.config.layer, vocab_size=rows, **int8.of("draft"))
    drafting = FeatureHead(dataclasses.replace(opened.config, layer=layer))
    if mesh is not None:
        model = shard_model(model, Layout.tensor_parallel(mesh))
        drafting = shard_head(drafting, draft_layout(mesh, draft_model_parallelism))
        drafting.param_shardings(jax.eval_shape(FeatureHead(drafting.config).init, jax.random.key(0)))
    check(model, drafting)
    check_readable(checkpoint, model)
    pair = Pair(
        target=model,
        target_params=read_params(checkpoint, model, progress),
        head=drafting,
        draft_params=read_head(opened, drafting, progress),
        tokenizer=checkpoint.tokenizer,
        stop=checkpoint.stop_ids or None,
        shards=DataShards(mesh),
    )
    if check_fit:
        check_fit(pair)
    return pair


def _devices(mesh: Mesh | None) -> int:
    """Returns the number of devices that hold one copy of a model together."""
    return 1 if mesh is None else mesh.shape[MODEL] * mesh.shape.get(REPLICA, 1)


def check_head_of(target: Checkpoint, head: HeadConfig, name: str) -> None:
    """Raises ValueError for a head that shares the embedding of a target which scales it."""
    if not head.own_embedding and target.config.embedding_scale is not None:
        raise ValueError(
            f"{name} shares the embedding of {target.name}, which scales it: heads of such targets are not read"
        )


def differences(target: Checkpoint, draft: Checkpoint) -> list[str]:
    """Returns where the two differ without harm: stop tokens, rows of padding, how texts are cut before merging.

    Raises:
      ValueError: their tokens do not mean the same, or their texts would be cut into other tokens; with the first
        difference of vocabulary, merges or added tokens.
    """
    notes = _compare_tokenizers(target.require_tokenizer(), draft.require_tokenizer())
    if set(target.stop_ids) != set(draft.stop_ids):
        notes.append(
            f"stop tokens differ: {sorted(target.stop_ids)} in the target, {sorted(draft.stop_ids)} in the draft; the "
            "target's end a text"
        )
    for checkpoint in (target, draft):
        if left_out := checkpoint.tokenizer.left_out:
            notes.append(f"{checkpoint.name} has no embedding of {', '.join(left_out[:3])}: prompts cannot use them")
    rows = target.config.vocab_size, draft.config.vocab_size
    if rows[0] != rows[1]:
        notes.append(
            f"the embeddings have {rows[0]} and {rows[1]} rows; both are masked beyond {target.tokenizer.vocab_size} tokens"
        )
    if draft.config.max_positions < target.config.max_positions:
        notes.append(
            f"the draft reads {draft.config.max_positions} tokens, the target {target.config.max_positions}: texts "
            "end with the draft's"
        )
    return notes


def padded_configs(target: Checkpoint, draft: Checkpoint, multiple: int) -> tuple[TransformerConfig, TransformerConfig]:
    """Returns both configs with the larger vocabulary, rounded up to a multiple; rows that no token has are masked."""
    rows = max(target.config.vocab_size, draft.config.vocab_size)
    vocabulary = dict(vocab_size=-(-rows // multiple) * multiple, num_real_tokens=target.tokenizer.vocab_size)
    return tuple(dataclasses.replace(checkpoint.config, **vocabulary) for checkpoint in (target, draft))


def _compare_tokenizers(target: JsonTokenizer, draft: JsonTokenizer) -> list[str]:
    """Returns how texts are prepared differently; raises ValueError where tokens or merges differ."""
    ours, theirs = (json.loads(tokenizer.to_json()) for tokenizer in (target, draft))

    def tokens(content: dict) -> dict[int, Any]:
        """Returns the piece of each id, whether an added token stands in the vocabulary as well or not."""
        vocabulary = content["model"]["vocab"]
        if isinstance(vocabulary, dict):
            pieces = {index: piece for piece, index in vocabulary.items()}
        else:  # Unigram: pieces and scores
            pieces = dict(enumerate(map(tuple, vocabulary)))
        return pieces | {token["id"]: token["content"] for token in content.get("added_tokens") or ()}

    def merges(content: dict) -> dict[int, str]:
        found = content["model"].get("merges") or ()
        return {i: " ".join(merge) if isinstance(merge, list) else merge for i, merge in enumerate(found)}

    _compare("vocabulary, at id", tokens(ours), tokens(theirs))
    _compare("merges, at merge", merges(ours), merges(theirs))
    return [
        f"the tokenizers' {part}s differ: some texts are cut into other tokens than the draft was trained on"
        for part in ("normalizer", "pre_tokenizer")
        if ours.get(part) != theirs.get(part)
    ]


def _compare(what: str, ours: dict[int, Any], theirs: dict[int, Any]) -> None:
    """Raises ValueError with the first key where the two differ."""
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):

            def shown(side):
                return repr(side[key]) if key in side else "nothing"

            raise ValueError(
                f"draft and target tokenizers differ in their {what} {key}: {shown(theirs)} in the draft, "
                f"{shown(ours)} in the target ({len(theirs)} and {len(ours)} entries); use a draft trained with the "
                "target's tokenizer"
            )
