"""Reads two public checkpoints, or a checkpoint and a head, as a pair, after a check that they fit
together; or one alone.

for check in check_pair("qwen-3b", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-0.5B"):  # downloads no weights
    print(check.model, check.problem or "loads")
"""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import Mesh

from specsamp import machine, validate
from specsamp.checkpoints.hub import why_not
from specsamp.checkpoints.hugging_face import (
    Checkpoint,
    OnProgress,
    check_readable,
    open_checkpoint,
    read_params,
)
from specsamp.checkpoints.public_heads import HeadCheckpoint, open_head, read_head
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.checkpoints.vocabulary import describe_overlap, match_vocabularies
from specsamp.decoding.data_shards import DataShards
from specsamp.decoding.drafters.translating import SharedVocabulary
from specsamp.decoding.pair import Pair
from specsamp.mesh.layout import MODEL, REPLICA, Layout
from specsamp.mesh.sharded import draft_layout, shard_head, shard_model
from specsamp.models.heads import Head
from specsamp.models.int8 import FLOAT, Int8
from specsamp.models.interface import LanguageModel
from specsamp.models.transformer import TransformerLM


def read_pair(
    target: str,
    draft: str | None,
    *,
    is_head: bool = False,
    other_vocabulary: bool = False,
    dtype: str = "bfloat16",
    int8: Int8 = FLOAT,
    mesh: Mesh | None = None,
    draft_model_parallelism: int | None = None,
    progress: OnProgress = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
    check: Callable[[LanguageModel, LanguageModel | Head | None], Any] = lambda *_: None,
) -> Pair:
    """Reads a pair of two checkpoints, or of a checkpoint and a head, ready for `generate`.

    Args:
      target, draft: folders, ``gs://`` folders or ids of the hub; or checkpoints converted by
        launch/export.py. Without a draft, None, see `read_target`.
      is_head: the draft is a head, which drafts from the target's hidden states.
      other_vocabulary: the draft model may have another tokenizer; then it drafts the shared
        tokens.
      dtype: of weights, activations and caches.
      int8: the sides in int8 instead; weights of models are quantised while they are read.
      mesh, draft_model_parallelism: see `specsamp.mesh.sharded.shard`; None: both on one
        device.
      progress: see `read_params`.
      say: called with a sentence for each harmless difference between target and draft.
      check: called with target and draft before any weight is read; raises ValueError to refuse
        them.

    Raises:
      FileNotFoundError, ValueError: before any weight is read: a checkpoint cannot be read, see
        `open_checkpoint` and `open_head`, or the two do not fit together, see `differences`.
    """
    machine.require_devices()
    validate.instance("int8", int8, Int8, "Int8(weights=('target',))")
    ours = open_checkpoint(target, dtype=dtype, **int8.of("target"))
    ours.require_tokenizer()
    if is_head and validate.switch("other_vocabulary", other_vocabulary):
        raise ValueError(
            "other_vocabulary is for draft models, but a head reads the target's tokens: leave it "
            "out"
        )
    theirs, notes, drafting, vocabulary = None, [], None, None
    if draft is not None:
        theirs, notes = open_draft(
            ours, draft, is_head=is_head, other_vocabulary=other_vocabulary, dtype=dtype, int8=int8
        )
    is_alone = draft is None or is_head or other_vocabulary
    model = _model_of(ours, ours, [ours] if is_alone else [ours, theirs], mesh)
    if theirs is not None:
        drafting, vocabulary = _draft_of(
            ours, theirs, model, other_vocabulary=other_vocabulary, int8=int8, mesh=mesh
        )
    if vocabulary is not None:
        notes.append(describe_overlap(vocabulary))
    for note in notes:
        say(note)
    if mesh is not None:
        model = shard_model(model, Layout.tensor_parallel(mesh))
        if drafting is not None:
            drafting = (shard_head if is_head else shard_model)(
                drafting, draft_layout(mesh, draft_model_parallelism)
            )
    check(model, drafting)
    check_readable(ours, model)
    if theirs is not None:
        check_readable(theirs, drafting)
    pair = Pair(
        target=model,
        target_params=read_params(ours, model, progress),
        tokenizer=ours.tokenizer,
        stop=ours.stop_ids or None,
        shards=DataShards(mesh),
    )
    if theirs is None:
        return pair
    draft_params = (read_head if is_head else read_params)(theirs, drafting, progress)
    drafts = {"head" if is_head else "draft": drafting, "vocabulary": vocabulary}
    return dataclasses.replace(pair, draft_params=draft_params, **drafts)


def read_target(target: str, **options: Any) -> Pair:
    """Reads a target alone, for drafters that need no other model; options and errors are those of
    `read_pair`.
    """
    return read_pair(target, None, **options)


def open_draft(
    target: Checkpoint,
    name: str,
    *,
    is_head: bool,
    other_vocabulary: bool = False,
    dtype: str = "bfloat16",
    int8: Int8 = FLOAT,
    headers_only: bool = False,
) -> tuple[Checkpoint | HeadCheckpoint, list[str]]:
    """Opens a draft model or head; returns it with its harmless differences from the target.

    Args:
      headers_only: see `open_head`.

    Raises:
      FileNotFoundError, ValueError: see `read_pair`.
    """
    target.require_tokenizer()
    if not is_head:
        draft = open_checkpoint(name, dtype=dtype, **int8.of("draft"))
        draft.require_tokenizer()
        return draft, [] if other_vocabulary else differences(target, draft)
    in_files = not headers_only and not target.is_converted
    embedding = target.tensors[target.sources()["embedding"].tensor] if in_files else None
    head = open_head(
        name, target.config, target_embedding=embedding, dtype=dtype, headers_only=headers_only
    )
    return head, head.notes(target.name)


def _model_of(
    checkpoint: Checkpoint, owner: Checkpoint, sharing: Sequence[Checkpoint], mesh: Mesh | None
) -> TransformerLM:
    """Returns the model of a checkpoint, its embedding padded to the size of all models that share
    the vocabulary.

    Rows are rounded up to divide over a mesh. Rows that are not tokens of the owner's tokenizer are
    masked.
    """
    # Which hold a copy together.
    devices = 1 if mesh is None else mesh.shape.get(MODEL, 1) * mesh.shape.get(REPLICA, 1)
    rows = -(-max(one.config.vocab_size for one in sharing) // devices) * devices
    real = min(owner.tokenizer.vocab_size, rows)
    return TransformerLM.for_backend(
        dataclasses.replace(checkpoint.config, vocab_size=rows, num_real_tokens=real)
    )


def _draft_of(
    ours: Checkpoint,
    theirs: Checkpoint | HeadCheckpoint,
    target: TransformerLM,
    *,
    other_vocabulary: bool,
    int8: Int8,
    mesh: Mesh | None,
) -> tuple[TransformerLM | Head, SharedVocabulary | None]:
    """Returns the draft model or head for a target, and the shared vocabulary if the tokenizers
    differ.
    """
    if isinstance(theirs, HeadCheckpoint):
        layer = dataclasses.replace(
            theirs.config.layer, vocab_size=target.vocab_size, **int8.of("draft")
        )
        return dataclasses.replace(theirs.config, layer=layer).head(), None
    if not other_vocabulary:
        return _model_of(theirs, ours, [ours, theirs], mesh), None
    draft = _model_of(theirs, theirs, [theirs], mesh)
    sizes = dict(target_size=target.vocab_size, draft_size=draft.vocab_size)
    return draft, match_vocabularies(ours.tokenizer, theirs.tokenizer, **sizes)


def differences(target: Checkpoint, draft: Checkpoint) -> list[str]:
    """Returns sentences on harmless differences: stop tokens, rows of padding, splitting of texts
    before merges.

    Raises:
      ValueError: their vocabularies or merges differ; with the first difference.
    """
    notes = _compare_tokenizers(target.require_tokenizer(), draft.require_tokenizer())
    if set(target.stop_ids) != set(draft.stop_ids):
        notes.append(
            f"stop tokens differ: {sorted(target.stop_ids)} in the target, which end a text, and "
            f"{sorted(draft.stop_ids)} in the draft"
        )
    for checkpoint in (target, draft):
        if left_out := checkpoint.tokenizer.left_out:
            notes.append(
                f"{checkpoint.name} has no embedding of {', '.join(left_out[:3])}: prompts cannot "
                "use them"
            )
    rows, theirs = target.config.vocab_size, draft.config.vocab_size
    if rows != theirs:
        real = target.tokenizer.vocab_size
        notes.append(
            f"the embeddings have {rows} and {theirs} rows; both are masked beyond {real} tokens"
        )
    length, theirs = target.config.max_positions, draft.config.max_positions
    if theirs < length:
        notes.append(
            f"the draft reads {theirs} tokens, the target {length}: texts end with the draft's"
        )
    return notes


def _compare_tokenizers(target: JsonTokenizer, draft: JsonTokenizer) -> list[str]:
    """Returns sentences on different preprocessing of texts; raises ValueError if tokens or merges
    differ.
    """
    ours, theirs = (json.loads(tokenizer.to_json()) for tokenizer in (target, draft))
    merges = [
        dict(enumerate(map(" ".join, content["model"].get("merges") or ())))
        for content in (ours, theirs)
    ]
    _compare("vocabulary, at id", target.pieces, draft.pieces)
    _compare("merges, at merge", *merges)
    return [
        f"the tokenizers' {part}s differ: some texts have other tokens than the draft was trained "
        "on"
        for part in ("normalizer", "pre_tokenizer")
        if ours.get(part) != theirs.get(part)
    ]


def _compare(what: str, ours: dict[int, str], theirs: dict[int, str]) -> None:
    """Raises ValueError with the first key at which the two differ."""
    for key in sorted(ours.keys() | theirs.keys()):
        if ours.get(key) != theirs.get(key):
            in_draft, in_target = (
                repr(side[key]) if key in side else "nothing" for side in (theirs, ours)
            )
            raise ValueError(
                f"draft and target tokenizers differ in their {what} {key}: {in_draft} in the "
                f"draft, {in_target} in the target ({len(theirs)} and {len(ours)} entries); use a "
                "draft with the target's tokenizer, or draft only shared tokens: "
                "other_vocabulary=True (--config.hugging_face.other_vocabulary)"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class NameCheck:
    """The result for one name of a pair."""

    pair: str
    role: str  # "target", "draft" or "head"
    model: str
    problem: str | None  # the reason why it would not load, None if it would
    notes: tuple[str, ...] = ()  # what differs without harm


def check_pair(
    name: str, target: str, draft: str, *, is_head: bool = False, chat: bool = False
) -> Iterator[NameCheck]:
    """Yields for the target, and for its draft model or head, whether they would load, without
    downloading weights.

    Configs, tokenizers and the headers of tensors are checked. The values of tensors are not
    checked: whether the output embedding of a tied model is its embedding, and the ids of a reduced
    vocabulary.

    Args:
      name: of the pair.
      target, draft: the names to check; without a draft, "", the target's alone.
      is_head: the draft is a head.
      chat: prompts are messages, so that the target needs a chat template.

    Raises:
      ConnectionError: the hub does not answer. ValueError: its library is not installed.
    """
    opened = None
    for role, model in (("target", target), ("head" if is_head else "draft", draft))[
        : 2 if draft else 1
    ]:
        problem, notes = why_not(model), []
        try:
            if problem is not None:
                pass
            elif role == "target":
                checkpoint = open_checkpoint(target)
                checkpoint.check_headers()
                if checkpoint.require_tokenizer().chat is None and chat:
                    raise ValueError(
                        "no chat template, but the prompts of this pair are messages, which need "
                        "one"
                    )
                opened = checkpoint
            elif opened is None:
                problem = "not checked: a draft is checked against its target, which does not load"
            else:
                found, notes = open_draft(opened, draft, is_head=is_head, headers_only=True)
                if not is_head:
                    found.check_headers()
        except (ValueError, OSError) as error:
            problem = " ".join(str(error).split())
        yield NameCheck(pair=name, role=role, model=model, problem=problem, notes=tuple(notes))
