"""Reads the fields of a configuration into one dataclass, each once, with its check."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import operator
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Self

from ml_collections import ConfigDict

from launch.lib.config import ConfigFlag
from launch.lib.drafters import (
    COLLECTIVES,
    DRAFTERS,
    AdaptiveFields,
    Word,
    check_word,
    meaning,
    read_corpus,
)
from launch.lib.own_code import is_own
from launch.lib.rules import make_rule
from specsamp import (
    Drafter,
    LanguageModel,
    ModelDrafter,
    NgramDrafter,
    NoDrafter,
    Pair,
    Rule,
    TokenRule,
    TransformerLM,
    TreeShape,
    WindowDrafter,
    storage,
    validate,
)
from specsamp.analysis.workload import Workload
from specsamp.decoding.method import Method, default_drafter
from specsamp.decoding.request import Prompt
from specsamp.models import config as models
from specsamp.models.heads import Head
from specsamp.models.int8 import SIDES, Int8
from specsamp.sampling.synthetic import SyntheticAcceptance
from specsamp.sampling.warp import Warp, chain, greedy, min_p, temperature, top_k, top_p

PRESETS = {
    name: getattr(models, name)
    for name in ("chinchilla_70b", "draft_4b", "target_38m", "draft_1m", "tiny")
}
# Fields that a compile report does not read.
NOT_COMPILED = (
    "adaptive chat draft_temperature max_new_tokens prompt_length prompts repeats seed "
    "synthetic_acceptance"
).split()
MACHINE = "machine"  # the draft length that launch/lib/machine_choice.py chooses
INT8_SIDES = {"none": (), "target": ("target",), "draft": ("draft",), "both": SIDES}

# Types of fields with their checks, for `read_fields`: a function of `validate`, and its arguments
# after the value.
Whole = Annotated[int, (validate.integer, 0)]
Positive = Annotated[int, (validate.integer, 1)]
Share = Annotated[float, (validate.number, 0, 1)]


def check_sinks(name: str, value: int | None) -> int:
    """Returns the number of a window's sinks; None: there are none."""
    return validate.integer(name, 0 if value is None else value, 0)


def with_digest(text: str, path: str) -> str:
    """Returns a text that names a file, with a digest of the file's contents."""
    return f"{text}@{hashlib.sha256(storage.place(path).read_bytes()).hexdigest()[:8]}"


def own_with_digest(word: str) -> str:
    """Returns the name of a drafter or a rule in results; code of the user's own has a digest."""
    return with_digest(word, f"{word.split('.py:')[0]}.py") if is_own(word) else word


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int8Fields:
    """The models of a pair that are decoded in int8: none, target, draft or both."""

    weights: Annotated[str, (validate.choice, INT8_SIDES)] = "none"
    caches: Annotated[str, (validate.choice, INT8_SIDES)] = "none"

    @property
    def sides(self) -> Int8:
        """Returns the sides of both."""
        return Int8(weights=INT8_SIDES[self.weights], caches=INT8_SIDES[self.caches])


def make_model(fields: Mapping[str, Any], **decoding: str | None) -> TransformerLM:
    """Returns the model of a preset of specsamp/models/config.py with changes of its shape.

    Args:
      fields: "preset", and fields of the shape; None keeps the preset's value.
      decoding: further fields of the shape, such as ``weight_dtype``.
    """
    changes = {name: value for name, value in fields.items() if value is not None}
    preset = PRESETS[validate.choice("preset", changes.pop("preset", None), PRESETS)]
    return TransformerLM.for_backend(preset(**changes, **decoding))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """The numbers of the sampling distribution; a temperature of 0 is greedy."""

    temperature: float
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1.0 is off
    min_p: float = 0.0  # 0.0 is off

    def __post_init__(self):
        self.warp()  # refuses numbers out of range

    def warp(self, *, as_chain: bool = False) -> Warp:
        """Returns the warp; leaves out fields that are off.

        A temperature of 0 is greedy, ``as_chain`` for a pair whose other warp is a chain.
        """
        if self.temperature == 0:
            return chain(temperature(0.0)) if as_chain else greedy()
        filters = [
            make(getattr(self, name)) for name, make, off in _FILTERS if getattr(self, name) != off
        ]
        return chain(temperature(self.temperature), *filters)


_FILTERS = (("top_k", top_k, 0), ("top_p", top_p, 1.0), ("min_p", min_p, 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshFields:
    """The numbers of devices of a pair, see configs/common.py."""

    data: Positive = 1
    model: Positive = 1
    draft_model_parallelism: Whole = 0

    @property
    def draft_devices(self) -> int | None:
        """Returns the devices of a copy of the draft; None: as many as the target's."""
        return self.draft_model_parallelism or None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicNames:
    """A pair of public checkpoints, or a target alone."""

    target: str
    draft: str = ""  # none
    dtype: str = "bfloat16"
    other_vocabulary: bool = False  # the draft may have another tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A configuration; ``recorded`` has all its fields in their original form, for files of results
    and of runs.
    """

    recorded: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_config_dict(cls, config: ConfigDict) -> Self:
        """Reads a configuration; raises ValueError for a field that is missing, unknown
        or wrong.
        """
        fields = config.to_dict()
        return read_fields(cls, {**fields, "recorded": fields})

    def turned(self, point: Mapping[str, Any]) -> Self:
        """Returns the configuration with other values, such as ``{"batch": 8,
        "sampling.temperature": 0.0}``.
        """
        fields = copy.deepcopy(self.recorded)
        for name, value in point.items():
            *groups, last = name.split(".")
            functools.reduce(operator.getitem, groups, fields)[last] = value
        return read_fields(type(self), {**fields, "recorded": fields})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig(Config):
    """The fields of a configuration (configs/random_pair.py), each read once and checked.

    configs/common.py explains the fields. A pair is named by ``pair``, by ``hugging_face``, or by
    the shapes ``target`` and ``draft``, of random weights.
    """

    rule: str
    drafter: Annotated[str, (check_word,)]
    draft_length: int | str  # or MACHINE
    sampling: SamplingFields
    mesh: MeshFields
    batch: int
    prompt_length: int
    max_new_tokens: int
    repeats: int
    seed: Annotated[int, (validate.integer, 0, 2**32)]
    exit_layer: Annotated[int | None, (validate.integer, 1)] = None
    window: Annotated[int | None, (validate.integer, 1)] = None
    sinks: Annotated[int, (check_sinks,)] = WindowDrafter.sinks
    corpus: str = ""
    mask_id: Annotated[int | None, (validate.integer, 0)] = None
    tree: Sequence[int] = ()
    adaptive: AdaptiveFields = AdaptiveFields()
    attention: str = "auto"
    int8: Int8Fields = Int8Fields()
    draft_temperature: Annotated[float | None, (validate.number, 0)] = None
    synthetic_acceptance: Annotated[float | None, (validate.number, 0, 1)] = None
    pair: str | None = None
    hugging_face: PublicNames | None = None
    prompts: Sequence[Prompt] | None = None
    chat: bool | None = None
    target: Mapping[str, Any] | None = None  # of `make_model`
    draft: Mapping[str, Any] | None = None

    def __post_init__(self):
        for name in self.word.reads:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is not set, and drafter={self.drafter} needs it: set it")
        if self.corpus and not storage.place(self.corpus).exists():
            raise ValueError(f"corpus={self.corpus}: there is no such file of texts")
        if self.draft_length != MACHINE:
            validate.integer("draft_length", self.draft_length, 0)
        elif not self.adaptive.is_off:
            raise ValueError(
                f"draft_length={MACHINE} is one length, and adaptive drafts have several: choose "
                "one of the two"
            )
        if self.hugging_face is not None and self.word.draft and not self.hugging_face.draft:
            raise ValueError(
                f"drafter={self.drafter} reads a draft, and {self.hugging_face.target} is a target "
                "alone: name both, as configs/hf.py:TARGET,DRAFT, or choose the drafter ngram, "
                "early_exit, window or none"
            )
        self.workload()  # refuses numbers out of range
        self._check_tree(make_rule(self.rule))

    def _check_tree(self, rule: Rule) -> None:
        """Raises ValueError for trees that drafter or rule do not support, and for rules of trees
        without a tree.
        """
        widths = validate.integers("tree", self.tree, 1)
        if not widths:
            if not rule.chains:
                raise ValueError(
                    f"rule={self.rule} verifies token trees: set tree, such as 3,2,1, or rule=token"
                )
            return
        if not self.word.trees:
            trees = ", ".join(name for name, word in DRAFTERS.items() if word.trees)
            raise ValueError(
                f"tree={tuple(widths)}, but drafter={self.drafter} drafts no trees; these do: "
                f"{trees}"
            )
        if not rule.trees:
            raise ValueError(
                f"rule={self.rule} verifies chains: with a tree, set rule to recursive, traversal "
                "or coupled"
            )
        if self.synthetic_acceptance is not None:
            raise ValueError("synthetic_acceptance is of chains: leave tree out")
        if self.draft_length == MACHINE:
            raise ValueError(
                f"tree={tuple(widths)} is a shape, and draft_length={MACHINE} a length: leave one "
                "out"
            )

    @property
    def writes_text(self) -> bool:
        """Returns whether the pair has a tokenizer."""
        return self.pair is not None or self.hugging_face is not None

    @property
    def word(self) -> Word:
        """Returns the meaning of the drafter's word."""
        return meaning(self.drafter)

    @property
    def drafter_name(self) -> str:
        """Returns the drafter's name in results: its word, the fields that it reads, and
        its tree; with digests of files that it names.
        """
        read = {field: getattr(self, field) for field in self.word.reads}
        if self.corpus and "corpus" in read:
            read["corpus"] = with_digest(self.corpus, self.corpus)
        fields = "; ".join(f"{field} {value}" for field, value in read.items() if value != "")
        name = own_with_digest(self.drafter) + (f" ({fields})" if fields else "")
        return f"{name} tree {'x'.join(map(str, self.tree))}" if self.tree else name

    @property
    def is_plain(self) -> bool:
        """Returns whether nothing is drafted."""
        return self.draft_length == 0 or not self.word.drafts

    @property
    def acceptance_rule(self) -> Rule:
        """Returns the acceptance rule, with synthetic acceptance if it is set; plain decoding has
        an exact rule.
        """
        rule = make_rule(self.rule)
        if self.is_plain:
            return rule if rule.exact else TokenRule()
        if self.synthetic_acceptance is None:
            return rule
        return SyntheticAcceptance(rule, self.synthetic_acceptance)

    @property
    def size(self) -> int | TreeShape:
        """Returns the shape of the token trees, or K."""
        return TreeShape.of_widths(*self.tree) if self.tree else self.draft_length

    def make_drafter(self, target: LanguageModel, draft: LanguageModel | Head | None) -> Drafter:
        """Returns the drafter; raises ValueError if it does not fit the target."""
        if self.draft_length == 0:
            return NoDrafter()
        return self.word.make(target, draft, self.size, self)

    def make_method(self, pair: Pair) -> Method:
        """Returns the method for a pair."""
        drafter = self.make_drafter(pair.target, pair.draft_or_head)
        if self.corpus and isinstance(drafter, NgramDrafter):
            corpus = read_corpus(self.corpus, pair.tokenizer)
            drafter = dataclasses.replace(drafter, corpus=corpus)
        if pair.vocabulary is not None and type(drafter) is ModelDrafter:
            drafter = default_drafter(pair, drafter.K)
        warps = {"sampling": self.sampling.warp()}
        if self.draft_temperature is not None:
            draft = dataclasses.replace(self.sampling, temperature=self.draft_temperature)
            one_is_greedy = (draft.temperature == 0) != (self.sampling.temperature == 0)
            warps["sampling"] = self.sampling.warp(as_chain=one_is_greedy)
            warps["draft_sampling"] = draft.warp(as_chain=one_is_greedy)
        return Method(
            drafter=drafter,
            rule=self.acceptance_rule,
            adaptive=self.adaptive.make(drafter),
            **warps,
        )

    def workload(self) -> Workload:
        """Returns the workload, without prompts."""
        names = ("batch", "prompt_length", "max_new_tokens", "repeats", "seed")
        return Workload(**{name: getattr(self, name) for name in names})


class ExperimentFlag(ConfigFlag):
    """The flag --config of a pair."""

    def __init__(self, default: str):
        super().__init__(default, ExperimentConfig)

    def read(self, others: Sequence[str], why: str) -> ExperimentConfig:
        """Returns the configuration.

        Raises:
          ValueError: one of the ``others`` was set, which this command does not read, or a field
            that the drafter does not read.
        """
        self.refuse_fields(others, why)
        self.refuse_unread()
        return self.value

    def refuse_unread(self, drafters: Sequence[str] = (), grid: Collection[str] = ()) -> None:
        """Raises ValueError for a field that was set and that none of the drafters reads.

        Args:
          drafters: the words that a command uses, if not that of the configuration alone.
          grid: the fields that --grid sets.
        """
        config = self.value
        words = [check_word("drafter", word) for word in dict.fromkeys(drafters)]
        words = words or [config.drafter]
        read = {name for word in words for name in meaning(word).reads}
        unread = {
            name: f"it is of drafter={reader}, not of {', '.join(words)}"
            for reader, word in DRAFTERS.items()
            for name in word.reads
            if name not in read
        }
        if not any(is_own(word) or meaning(word).draft for word in words):
            for name, side in vars(config.int8).items():
                if side == "draft":
                    unread[f"int8.{name}"] = f"drafter={', '.join(words)} reads no draft"
        if {part for word in words for part in word.split(":")} <= {"ngram", "none", *COLLECTIVES}:
            unread["draft_temperature"] = f"drafter={', '.join(words)} draws no tokens"
        if config.tree:
            unread["draft_length"] = f"tree={tuple(config.tree)} has its own"
        for name, why in unread.items():
            self.refuse_fields([name], why)
            if name in grid:
                raise ValueError(f"--grid={name} has no effect: {why}")


def read_fields(kind: type, fields: Mapping[str, Any], group: str = "") -> Any:
    """Returns a dataclass of the fields of a configuration, or of the fields in a ``group``
    ("train.").
    """
    known = {field.name: field for field in dataclasses.fields(kind)}
    hints, values = _hints(kind), {}
    missing = [
        name
        for name, field in known.items()
        if field.default is dataclasses.MISSING and name not in fields
    ]
    if missing:
        names = ", ".join(group + name for name in missing)
        raise ValueError(f"--config has no field {names}: this command needs another configuration")
    try:
        for name, value in fields.items():
            if name not in known:
                raise ValueError(
                    f"--config has a field {group}{name}, which nothing reads: leave it out"
                )
            inner = next(
                filter(dataclasses.is_dataclass, (hints[name], *typing.get_args(hints[name]))), None
            )
            if inner is not None and isinstance(value, Mapping):
                value = read_fields(inner, value, f"{name}.")
            elif isinstance(value, int) and str(known[name].type).startswith("float"):
                value = float(value)
            if value is not None or known[name].default is not None:
                for check, *limits in getattr(hints[name], "__metadata__", ()):
                    value = check(name, value, *limits)
            values[name] = value
        return kind(**values)
    except ValueError as error:  # a message begins with a field: it gets the name of its flag
        message = str(error).removeprefix(group)
        if re.match(r"\w*", message)[0] not in known:
            raise
        raise ValueError(f"--config.{group}{message}") from error


_hints = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))
