"""Reads the fields of a configuration into one dataclass, and makes the pair and what decodes it of that.

`ExperimentConfig` checks every field; what comes after it, commands and studies alike, sees no ConfigDict.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict
from rich.console import Console

from launch.lib import entry
from launch.lib.config import choose, load_config
from launch.lib.drafters import DRAFTERS, AdaptiveFields, Word
from launch.lib.rules import make_rule
from launch.lib.shapes import Int8Fields, ModelFields, known_models, looked_up_parameters
from specsamp import storage
from specsamp.analysis.workload import Workload, check_positions
from specsamp.checkpoints.head_check import check_head, write_texts
from specsamp.checkpoints.pair import fingerprint, load_pair, load_prompts
from specsamp.checkpoints.params import digest_of_pair
from specsamp.checkpoints.public_pair import read_head_pair, read_pair
from specsamp.decoding.adaptive import Adaptive
from specsamp.decoding.checks import Prompt, encode, integer
from specsamp.decoding.data_shards import DataShards
from specsamp.decoding.drafter import Drafter
from specsamp.decoding.drafters import NoDrafter
from specsamp.decoding.pair import Pair
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import ShardedModel, draft_layout, placed_params, shard, shard_model, with_attention
from specsamp.models.heads import FeatureHead
from specsamp.models.int8 import decode_weights
from specsamp.models.interface import LanguageModel
from specsamp.models.kernels.cache import choose_kernels
from specsamp.models.transformer import TransformerLM
from specsamp.sampling.rules import Rule
from specsamp.sampling.synthetic import SyntheticAcceptance
from specsamp.sampling.warp import Warp, chain, greedy, min_p, temperature, top_k, top_p
from specsamp.text_format import human_count
from specsamp.training.checkpoint import Checkpoints

CHECKED_PROMPTS, CHECKED_TOKENS = 4, 32  # of a head, on loading


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """How texts are sampled; a temperature of 0 is greedy."""

    temperature: float
    top_k: int = 0  # 0 is off
    top_p: float = 1.0  # 1.0 is off
    min_p: float = 0.0  # 0.0 is off

    def __post_init__(self):
        self.warp()  # refuses numbers out of range

    def warp(self) -> Warp:
        """Returns the distribution; fields that are off (temperature 0 apart, which is greedy) are left out of it."""
        if self.temperature == 0:
            return greedy()
        filters = [make(getattr(self, name)) for name, make, off in _FILTERS if getattr(self, name) != off]
        return chain(temperature(self.temperature), *filters)


_FILTERS = (("top_k", top_k, 0), ("top_p", top_p, 1.0), ("min_p", min_p, 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshFields:
    """The devices that a pair is spread over, see configs/common.py."""

    data: int = 1
    model: int = 1
    draft_model_parallelism: int = 0
    num_kv_heads: int | None = None  # only a pair of public checkpoints says it


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicNames:
    """A pair of public checkpoints."""

    target: str
    draft: str
    dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFields:
    """Folders of training runs; an empty one stands for random weights."""

    target: str = ""
    draft: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExperimentConfig:
    """Holds the fields of a configuration such as configs/random_pair.py, each read once and checked.

    configs/common.py says what the fields mean. A pair is named by ``pair``, by ``hugging_face``, or by the shapes
    ``target`` and ``draft`` with or without ``checkpoints``.
    """

    rule: str
    drafter: str
    draft_length: int
    sampling: SamplingFields
    mesh: MeshFields
    batch: int
    prompt_length: int
    max_new_tokens: int
    repeats: int
    seed: int
    beams: int = 4
    exit_layer: int | None = None
    adaptive: AdaptiveFields | None = None
    attention: str = "plain"
    int8: Int8Fields = Int8Fields()
    draft_temperature: float | None = None
    synthetic_acceptance: float | None = None
    pair: str | None = None
    hugging_face: PublicNames | None = None
    prompts: Sequence[Prompt] | None = None
    chat: bool | None = None
    target: ModelFields | None = None
    draft: ModelFields | None = None
    checkpoints: CheckpointFields | None = None

    def __post_init__(self):
        choose("drafter", self.drafter, DRAFTERS)
        if self.word.takes:
            integer(self.word.takes, self.own_number, 1)
        integer("draft_length", self.draft_length, 0)
        integer("seed", self.seed, 0, 2**32)
        self.workload()  # refuses numbers out of range
        if self.draft_temperature is not None:
            temperature(self.draft_temperature)
        rule = make_rule(self.rule)
        if self.synthetic_acceptance is not None:
            SyntheticAcceptance(rule, self.synthetic_acceptance)

    @classmethod
    def from_config_dict(cls, config: ConfigDict) -> ExperimentConfig:
        """Reads a configuration.

        Raises:
          ValueError: a field that is missing, that nothing reads, or whose value is wrong.
        """
        return _read(cls, config.to_dict())

    @classmethod
    def from_file(cls, text: str) -> ExperimentConfig:
        """Reads the configuration of ``FILE.py:WORD``."""
        return cls.from_config_dict(load_config(text))

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as the configuration has them, and as files of results hold them."""
        told = dataclasses.asdict(self)
        told |= {side: dict(told[side]["fields"]) for side in ("target", "draft") if told[side] is not None}
        if self.mesh.num_kv_heads is None:
            del told["mesh"]["num_kv_heads"]
        return {name: value for name, value in told.items() if value is not None or name not in _LEFT_OUT}

    def turned(self, point: Mapping[str, Any]) -> ExperimentConfig:
        """Returns the configuration with other values, such as ``{"batch": 8, "sampling.temperature": 0.0}``."""
        fields = self.to_dict()
        for name, value in point.items():
            *groups, last = name.split(".")
            functools.reduce(operator.getitem, groups, fields)[last] = value
        return _read(ExperimentConfig, fields)

    @property
    def writes_text(self) -> bool:
        """Returns whether the pair is one with a tokenizer."""
        return self.pair is not None or self.hugging_face is not None

    @property
    def num_kv_heads(self) -> int | None:
        """Returns the kv heads of the target, where the configuration says them."""
        if self.hugging_face is not None:
            return self.mesh.num_kv_heads or None
        return None if self.target is None else self.target.model().config.num_kv_heads

    @property
    def word(self) -> Word:
        """Returns what the word of the drafter means."""
        return DRAFTERS[self.drafter]

    @property
    def own_number(self) -> int | None:
        """Returns the number that the drafter takes beside K, such as its beams."""
        return getattr(self, self.word.takes) if self.word.takes else None

    @property
    def drafter_name(self) -> str:
        """Returns what results call the drafter: its word, and the number that it takes."""
        return f"{self.drafter} {self.own_number}" if self.word.takes else self.drafter

    @property
    def is_plain(self) -> bool:
        """Returns whether nothing is drafted."""
        return self.draft_length == 0 or not self.word.drafts

    def make_drafter(
        self, target: LanguageModel, draft: LanguageModel | FeatureHead | None, draft_length: int | None = None
    ) -> Drafter:
        """Returns the drafter, or one that drafts nothing for K = 0.

        Args:
          draft_length: K; None: the configuration's.

        Raises:
          ValueError: a field that does not fit the target.
        """
        K = self.draft_length if draft_length is None else draft_length
        return self.word.make(target, draft, K, self.own_number) if K else NoDrafter()

    def make_adaptive(self, drafter: Drafter) -> Adaptive | None:
        """Returns the draft lengths that rows choose from; None: it is always the drafter's K."""
        return None if self.adaptive is None else self.adaptive.make(drafter)

    def workload(self) -> Workload:
        """Returns what is decoded, without prompts."""
        names = ("batch", "prompt_length", "max_new_tokens", "repeats", "seed")
        return Workload(**{name: getattr(self, name) for name in names})


_GROUPS = {
    "sampling": SamplingFields,
    "mesh": MeshFields,
    "adaptive": AdaptiveFields,
    "int8": Int8Fields,
    "hugging_face": PublicNames,
    "checkpoints": CheckpointFields,
}
_LEFT_OUT = {"pair", "hugging_face", "prompts", "chat", "target", "draft", "checkpoints", "adaptive"}  # where None


def _read(kind: type, fields: Mapping[str, Any], group: str = "") -> Any:
    """Returns a dataclass of the fields of a configuration, or of a group of them."""
    known, values = {field.name: field for field in dataclasses.fields(kind)}, {}
    missing = [name for name, field in known.items() if field.default is dataclasses.MISSING and name not in fields]
    if missing:
        names = ", ".join(group + name for name in missing)
        raise ValueError(f"--config has no field {names}: this command needs a configuration that has")
    for name, value in fields.items():
        if name not in known:
            raise ValueError(f"--config has a field {group}{name}, which nothing reads: leave it out")
        if name in _GROUPS and isinstance(value, Mapping):
            value = _read(_GROUPS[name], value, f"{name}.")
        elif isinstance(value, Mapping):  # a model's
            value = ModelFields(tuple(value.items()))
        elif isinstance(value, int) and known[name].type.startswith("float"):
            value = float(value)
        values[name] = value
    return kind(**values)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """Holds what a configuration such as configs/random_pair.py describes."""

    pair: Pair
    pair_name: str | None  # None: random parameters
    drafter: Drafter
    rule: Rule
    sampling: Warp
    workload: Workload
    adaptive: Adaptive | None = None  # the draft length, where the drafter's K is only the most
    folder: str | None = None  # name or folder of a pair that was trained here

    @functools.cached_property
    def weights(self) -> str | None:
        """Returns what tells these weights from others: a `fingerprint` of files or a digest; None: they are random.

        It may read all parameters: only what writes cells asks, and all processes do.
        """
        if self.folder is not None:
            return fingerprint(self.folder, "model" if self.pair.head is None else "head")
        return None if self.pair_name is None else digest_of_pair(self.pair)

    @property
    def configs(self) -> dict[str, Any]:
        """Returns the shape of the target and of what drafts, a model or a head."""
        return {"target": self.pair.target.config, "draft": self.pair.draft_or_head.config}


def build(
    config: ExperimentConfig, prompts: Sequence[Prompt] = (), mesh: Mesh | None = None, *, check_heads: bool = True
) -> Experiment:
    """Loads the pair of a configuration, or makes one with random parameters, after all that can be checked before.

    Args:
      prompts: to decode, for a pair with a tokenizer; default the ones that come with it.
      mesh: to spread the models over; None leaves them on one device.
      check_heads: says how well a head fits its target, on a few texts, before much is decoded with it.

    Raises:
      ValueError: what does not fit the models; the message says which field, and what would fit.
      FileNotFoundError: there is no such pair.
    """
    choose_kernels(config.attention)
    word, known, workload = config.word, known_models(config), config.workload()
    if "target" in known and ("draft" in known or word.draft != "head"):  # heads in files are checked when opened
        drafter = config.make_drafter(known["target"], known.get("draft"))  # refuses what does not fit the target
        config.make_adaptive(drafter)
    for side, model in known.items():
        if side == "target" or word.draft == "model":
            check_positions(side, model.max_positions, workload, config.draft_length)
    name, draft_model_parallelism = config.pair, config.mesh.draft_model_parallelism or None
    if config.hugging_face is not None:
        pair = read_public_pair(config, mesh)
        name = f"{config.hugging_face.target}, {config.hugging_face.draft}"
        workload = with_prompts(workload, pair, prompts or config.prompts, chat=bool(config.chat))
    elif name is None:
        if prompts:
            raise ValueError("a pair with random weights or from checkpoints has no tokenizer: it takes no prompts")
        folders = config.checkpoints or CheckpointFields()
        runs = (folders.target, folders.draft)
        pair = bare_pair(
            known["target"],
            known["draft"],
            config.seed,
            mesh=mesh,
            draft_model_parallelism=draft_model_parallelism,
            runs=runs,
        )
        name = ", ".join(run or "random" for run in runs) if any(runs) else None
    else:
        # A head is checked below, on these prompts.
        pair = load_pair(name, draft=word.draft or "model", int8=config.int8.sides, check_fit=False)
        if mesh is not None:
            pair = shard(pair, mesh, draft_model_parallelism=draft_model_parallelism)
        workload = with_prompts(workload, pair, prompts or load_prompts(name))
    pair = with_attention(pair, config.attention)
    drafter, sampling = config.make_drafter(pair.target, pair.draft_or_head), config.sampling.warp()
    if check_heads and pair.head is not None and drafter.hidden_layers and workload.prompts:
        say_how_a_head_fits(pair, workload, drafter.K, sampling)
    return Experiment(
        pair=pair,
        pair_name=name,
        drafter=drafter,
        rule=make_rule(config.rule),
        sampling=sampling,
        workload=workload,
        adaptive=config.make_adaptive(drafter),
        folder=config.pair,
    )


def say_how_a_head_fits(pair: Pair, work: Workload, K: int, sampling: Warp) -> None:
    """Prints how often a head would be accepted after a few prompts, and loudly if that is hardly or read wrongly.

    Texts that are too short for a draft say nothing.
    """
    console = Console(stderr=True, quiet=jax.process_index() != 0, highlight=False, soft_wrap=True)
    tokens = min(CHECKED_TOKENS, work.max_new_tokens)
    texts = write_texts(pair, work.prompts[:CHECKED_PROMPTS], tokens=tokens, sampling=sampling)
    if max(map(len, texts)) < K + 2:
        return
    found = check_head(pair, texts, K, sampling=sampling)
    for sentence in found.sentences:
        console.print(entry.visible(sentence), style=None if found.fits else "bold red", markup=False)
    if not found.fits:
        console.print("launch/doctor.py --look_at=head with the same configuration shows all readings", markup=False)


def read_public_pair(config: ExperimentConfig, mesh: Mesh | None) -> Pair:
    """Reads the pair of configs/hf.py, with a line for every gigabyte and for every difference of the two."""
    console = Console(stderr=True, quiet=jax.process_index() != 0, highlight=False)
    # How a head fits is said by `build`, on the prompts that are meant.
    read = functools.partial(read_head_pair, check_fit=False) if config.word.draft == "head" else read_pair
    return read(
        config.hugging_face.target,
        config.hugging_face.draft,
        dtype=config.hugging_face.dtype,
        int8=config.int8.sides,
        mesh=mesh,
        draft_model_parallelism=config.mesh.draft_model_parallelism or None,
        progress=entry.weights_progress(console),
        say=lambda text: console.print(entry.visible(text), markup=False, soft_wrap=True),
        check=config.make_drafter,
    )


def with_prompts(workload: Workload, pair: Pair, prompts: Sequence[Prompt], *, chat: bool = False) -> Workload:
    """Returns the workload with these prompts, and room for the longest.

    Args:
      chat: texts are the first message of a user to a tuned model, written out by its chat template.
    """
    asked = [[{"role": "user", "content": one}] if chat and isinstance(one, str) else one for one in prompts]
    tokens = tuple(map(tuple, encode(pair, asked)))
    longest = max(map(len, tokens))
    return dataclasses.replace(workload, prompts=tokens, prompt_length=max(workload.prompt_length, longest))


def make_sampling(fields: SamplingFields) -> Warp:
    return fields.warp()  # for studies that have not moved yet


def headline(experiment: Experiment, task: str | None = None) -> str:
    """Returns three lines on what is about to run; ``task`` is said instead of the configuration's one cell."""
    pair, work = experiment.pair, experiment.workload

    def count(model):
        if model is None:
            size = sum(leaf.size for leaf in jax.tree.leaves(pair.draft_params))
            return f"a head of {human_count(size)} parameters"
        stored, looked_up = model.config.num_parameters, looked_up_parameters(model.config)
        told = f"{human_count(stored)} parameters"
        if looked_up:
            told += f" (a step streams {human_count(stored - looked_up)}: the rest are tables of n-grams)"
        if model.config.experts:
            told += f" (a token uses {human_count(model.config.num_active_parameters)}: it chooses experts)"
        return told

    device, devices = jax.devices()[0], jax.device_count() if isinstance(pair.target, ShardedModel) else 1
    random = (
        "The weights are random: a round takes as long as a trained pair's, but acceptance and speedup mean nothing."
    )
    length = experiment.drafter.K if experiment.adaptive is None else f"adaptive, up to {experiment.drafter.K}"
    cell = (
        f"{type(experiment.drafter).__name__} K = {length}, {rule_name(experiment.rule)}, "
        f"batch {work.batch}, {work.prompt_length} + {work.max_new_tokens} tokens, {work.repeats} repeats"
    )
    return (
        f"target {count(pair.target)}, draft {count(pair.draft)}, V = {pair.target.vocab_size}, "
        f"{pair.target.config.dtype}, {devices} x {device.platform} ({device.device_kind})\n"
        f"{task or cell}\n"
        + (
            f"the pair {experiment.pair_name!r}, {len(work.prompts)} prompt{'s' * (len(work.prompts) != 1)}"
            if experiment.pair_name
            else random
        )
    )


def rule_name(rule: Rule) -> str:
    """Returns what a reader calls a rule; a lossy one with its constants, and that it is lossy."""
    return type(rule).__name__ if rule.exact else f"{rule!r} (LOSSY: texts do not follow the target's distribution)"


def bare_pair(
    target: TransformerLM,
    draft: TransformerLM | None,
    seed: int,
    *,
    mesh: Mesh | None = None,
    draft_model_parallelism: int | None = None,
    runs: tuple[str, str] = ("", ""),
) -> Pair:
    """Makes a pair without a tokenizer, its parameters of training runs, or random where a name is empty.

    They are in the compute dtype and where they belong from the start: a large model fits nowhere else.
    """
    if mesh is not None:
        target = shard_model(target, Layout.tensor_parallel(mesh))
        draft = draft and shard_model(draft, draft_layout(mesh, draft_model_parallelism))
    keys = jax.random.split(jax.random.key(seed, impl="threefry2x32"))
    with jax.disable_jit(False):  # nobody debugs how random numbers are made
        params = [
            read_params(model, folder) if folder else random_params(model, key)
            for model, key, folder in zip((target, draft), keys, runs)
            if model is not None
        ]
    drafts = {} if draft is None else {"draft": draft, "draft_params": params[1]}
    pair = Pair(target=target, target_params=params[0], **drafts)
    return pair if mesh is None else dataclasses.replace(pair, shards=DataShards(mesh))


def random_params(model: TransformerLM | ShardedModel, key: jax.Array) -> Any:
    def make(key):
        params = jax.tree.map(lambda x: x.astype(model.config.compute_dtype), model.init(key))
        params = decode_weights(params, model.config.compute_dtype, model.config.weight_dtype)
        if isinstance(model, ShardedModel):
            params = jax.lax.with_sharding_constraint(params, model.param_shardings(params))
        return params

    return jax.jit(make)(key)


def read_params(model: TransformerLM | ShardedModel, folder: str) -> Any:
    """Reads the parameters of the last checkpoint of a training run, whatever the mesh it was saved from."""
    place = storage.place(folder) / "checkpoints"
    if not place.exists():
        raise FileNotFoundError(f"no training run at {folder!r}: it has no checkpoints")
    with contextlib.closing(Checkpoints(place)) as checkpoints:
        params = checkpoints.restore(params=placed_params(_in_float(model)))["params"]
    return decode_weights(params, model.config.compute_dtype, model.config.weight_dtype)


def _in_float(model: TransformerLM | ShardedModel) -> TransformerLM | ShardedModel:
    """Returns the model as training runs store it, without int8 weights."""
    if isinstance(model, ShardedModel):
        return dataclasses.replace(model, model=_in_float(model.model))
    return dataclasses.replace(model, config=dataclasses.replace(model.config, weight_dtype=None))


def config_mesh(config: ExperimentConfig) -> Mesh | None:
    """Returns the mesh of a configuration over all devices of all processes; None for a single device.

    Raises:
      ValueError: it does not match the devices, with both numbers.
    """
    fields = config.mesh
    if fields.data * fields.model == 1 and jax.process_count() == 1:
        return None
    return make_mesh(
        fields.data,
        fields.model,
        draft_model_parallelism=fields.draft_model_parallelism or None,
        num_kv_heads=config.num_kv_heads,
        rows=config.batch // max(fields.data, 1),  # 0 is refused with the mesh
    )


def refuse(config: ExperimentConfig, *names: str) -> None:
    """Refuses fields that a command does not heed.

    Raises:
      ValueError: one is.
    """
    for name in names:
        if getattr(config, name) is not None:
            raise ValueError(
                f"{name} = {getattr(config, name)!r} would not be heeded here; launch/benchmark.py takes it"
            )
