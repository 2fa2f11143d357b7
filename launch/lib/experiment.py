"""Makes the pair of a configuration, its method and its workload."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
from etils import epath
from jax.sharding import Mesh
from rich.console import Console

from launch.lib import entry
from launch.lib.fields import MACHINE, ExperimentConfig, Int8Fields, PublicNames
from launch.lib.own_code import is_own
from launch.lib.shapes import is_model, known_models
from specsamp import Method, Pair, Rule, TransformerLM, storage, validate
from specsamp.analysis.workload import Workload, check_positions
from specsamp.checkpoints.architectures import parse_config
from specsamp.checkpoints.hub import find_folder
from specsamp.checkpoints.params import digest_of_pair
from specsamp.checkpoints.public_pair import read_pair
from specsamp.checkpoints.tokenizer import JsonTokenizer
from specsamp.checkpoints.trained_pair import HEADS, load_pair, load_prompts
from specsamp.checkpoints.vocabulary import shared_mass
from specsamp.decoding.data_shards import DataShards
from specsamp.decoding.request import Prompt, encode
from specsamp.mesh.layout import Layout, make_mesh, mesh_axes
from specsamp.mesh.sharded import ShardedModel, draft_layout, shard, shard_model, with_attention
from specsamp.models import few_rows
from specsamp.models.int8 import decode_weights
from specsamp.models.kernels.dispatch import choose_kernels
from specsamp.sampling.warp import Warp
from specsamp.tpu.int8_time import over_bfloat16

CHECKED_PROMPTS, CHECKED_TOKENS = 4, 32  # of a head, on loading


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """Holds the objects that a configuration describes, for example configs/random_pair.py."""

    pair: Pair
    pair_name: str | None  # None: random parameters
    method: Method
    workload: Workload

    @functools.cached_property
    def weights(self) -> str | None:
        """Returns a digest of the weights, which all processes read together; None: they are
        random.
        """
        return None if self.pair_name is None else digest_of_pair(self.pair)


def use_few_rows(config: ExperimentConfig, console: Console) -> None:
    """Turns on the kernel of `specsamp.models.few_rows` for a pair on one CPU device, and prints
    whether it is used.
    """
    one_device = config.mesh.data * config.mesh.model == 1
    if jax.default_backend() == "cpu" and one_device and not jax.config.jax_disable_jit:
        with entry.progress(console, "building the kernel for few rows, unless it is kept already"):
            found = few_rows.build()
        console.print(found, style="dim")


def say_where_int8_is_slower(config: ExperimentConfig) -> None:
    """Prints a line if int8 takes longer than bfloat16 on this TPU at this batch."""
    device, rows = jax.devices()[0], max(config.batch // config.mesh.data, 1)
    ratio = over_bfloat16(device.device_kind, rows)
    if config.int8 != Int8Fields() and ratio is not None and ratio > 1:
        entry.make_console(stderr=True).print(
            f"int8 is slower than bfloat16 on {device.device_kind} at batch {rows}: a layer of the "
            f"70B of configs/chinchilla.py takes {ratio} times as long (compiler estimate); leave "
            "--config.int8 out",
            style="bold red",
        )


def build(
    config: ExperimentConfig,
    prompts: Sequence[Prompt] = (),
    *,
    check_heads: bool = True,
    all_fields: bool = False,
) -> Experiment:
    """Loads the pair of a configuration, or makes one with random parameters; first, it checks what
    it can.

    Args:
      prompts: to decode, for a pair with a tokenizer; default the prompts of the pair.
      check_heads: prints how well a head fits its target, on a few texts.
      all_fields: accepts the temperature of the draft and made-up acceptance, which only some
        commands read.
    """
    for field in () if all_fields else ("draft_temperature", "synthetic_acceptance"):
        if (value := getattr(config, field)) is not None:
            raise ValueError(
                f"--config.{field}={value} has no effect here: use launch/benchmark.py"
            )
    if config.draft_length == MACHINE:
        raise ValueError(
            f"--config.draft_length={MACHINE} has no effect here: use demo, benchmark, chat or "
            "serve"
        )
    mesh = config_mesh(config)
    choose_kernels(config.attention)
    say_where_int8_is_slower(config)
    word, known, workload = config.word, known_models(config), config.workload()
    # Also of a drafter that --grid or --methods names.
    if config.exit_layer is not None and "target" in known:
        validate.integer("--config.exit_layer", config.exit_layer, 1, known["target"].num_layers)
    # Heads, and unknown drafts of own code, are checked when opened.
    late = word.draft in HEADS or is_own(config.drafter)
    if "target" in known and ("draft" in known or not late):
        # Refuses drafters that do not fit the target.
        drafter = config.make_drafter(known["target"], known.get("draft"))
        config.adaptive.make(drafter)
    for side, model in known.items():
        if side == "target" or word.draft == "model":
            check_positions(side, model.max_positions, workload, config.draft_length)
    name, draft_devices = config.pair, config.mesh.draft_devices
    if prompts and not config.writes_text:
        raise ValueError(
            "--config names a pair without a tokenizer, which reads and writes no text: give "
            "another pair"
        )
    if config.hugging_face is not None:
        pair = read_public_pair(config, mesh)
        name = ", ".join(filter(None, (config.hugging_face.target, config.hugging_face.draft)))
        workload = with_prompts(workload, pair, prompts or config.prompts, chat=bool(config.chat))
    elif name is not None:
        pair = load_pair(name, draft=word.draft or "model", int8=config.int8.sides)
        if mesh is not None:
            pair = shard(pair, mesh, draft_model_parallelism=draft_devices)
        workload = with_prompts(workload, pair, prompts or load_prompts(name))
    else:
        pair = bare_pair(known["target"], known.get("draft"), config.seed, mesh, draft_devices)
    pair = with_attention(pair, config.attention)
    method = config.make_method(pair)
    if pair.vocabulary is not None and workload.prompts:
        mass = shared_mass(
            pair.draft, pair.draft_params, pair.vocabulary, workload.prompts[:CHECKED_PROMPTS]
        )
        entry.make_console(stderr=True).print(
            f"On the prompts, {mass:.1%} of the draft's probability is on shared tokens."
        )
    if check_heads and pair.head is not None and method.drafter.hidden_layers and workload.prompts:
        say_how_a_head_fits(pair, workload, method.sampling)
    return Experiment(pair=pair, pair_name=name, method=method, workload=workload)


def say_how_a_head_fits(pair: Pair, work: Workload, sampling: Warp) -> None:
    """Prints a head's acceptance on a few texts; in red if it is low."""
    from specsamp.evaluation.head_check import check_head

    console = entry.make_console(stderr=True)
    tokens = min(CHECKED_TOKENS, work.max_new_tokens)
    found = check_head(pair, work.prompts[:CHECKED_PROMPTS], tokens=tokens, sampling=sampling)
    for sentence in found.sentences:
        console.print(entry.visible(sentence), style=None if found.fits else "bold red")


def read_public_pair(config: ExperimentConfig, mesh: Mesh | None) -> Pair:
    """Reads the models of configs/hf.py; prints a line for every gigabyte and every difference of
    the two. For a drafter that may read either, the draft is a head or a model by its config.json.
    """
    console, names, kind = entry.make_console(stderr=True), config.hugging_face, config.word.draft
    draft, is_head = names.draft, kind in HEADS
    if kind is None and draft == names.target:  # whose module drafts
        draft = ""
    elif kind is None and draft:
        is_head = not is_model(storage.read_json(config_path(draft)))
    return read_pair(
        names.target,
        draft or None,
        is_head=is_head,
        other_vocabulary=names.other_vocabulary,
        dtype=names.dtype,
        int8=config.int8.sides,
        mesh=mesh,
        draft_model_parallelism=config.mesh.draft_devices,
        progress=entry.weights_progress(console),
        say=lambda text: console.print(entry.visible(text)),
        check=config.make_drafter,
    )


def with_prompts(
    workload: Workload, pair: Pair, prompts: Sequence[Prompt], *, chat: bool = False
) -> Workload:
    """Returns the workload with prompts and room for the longest; with ``chat``, texts are messages
    of a user.
    """
    asked = []
    for prompt in prompts:
        if isinstance(prompt, str):
            if isinstance(pair.tokenizer, JsonTokenizer) and not pair.tokenizer.knows(prompt):
                raise ValueError(f"the pair has no token of {prompt[:40]!r}: it reads other texts")
            prompt = [{"role": "user", "content": prompt}] if chat else prompt
        asked.append(prompt)
    tokens = tuple(map(tuple, encode(pair, asked)))
    longest = max([workload.prompt_length, *map(len, tokens)])
    return dataclasses.replace(workload, prompts=tokens, prompt_length=longest)


def headline(experiment: Experiment, task: str | None = None) -> str:
    """Returns three lines on the models, the task (or else the configuration's one cell) and the
    weights.
    """
    pair, work, drafter = experiment.pair, experiment.workload, experiment.method.drafter
    device = jax.devices()[0]
    devices = jax.device_count() if isinstance(pair.target, ShardedModel) else 1
    length = drafter.K if experiment.method.adaptive is None else f"adaptive, up to {drafter.K}"
    cell = (
        f"{type(drafter).__name__} K = {length}, {rule_name(experiment.method.rule)}, batch "
        f"{work.batch}, {work.prompt_length} + {work.max_new_tokens} tokens, {work.repeats} repeats"
    )
    weights = (
        "The weights are random: rounds take as long as a trained pair's, but acceptance and "
        "speedup mean nothing."
    )
    if experiment.pair_name:
        count = len(work.prompts)
        weights = f"the pair {experiment.pair_name!r}, {count} prompt{'s' * (count != 1)}"
    drafting = "no draft"
    if pair.draft_or_head is not None:
        drafting = f"{'draft' if pair.head is None else 'head'} {_size(pair.draft_params)}"
    return (
        f"target {_size(pair.target_params)}, {drafting}, V = {pair.target.vocab_size}, "
        f"{pair.target.config.dtype}, {devices} x {device.platform} ({device.device_kind})\n"
        f"{task or cell}\n{weights}"
    )


def _size(params: Any) -> str:
    return f"{sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters"


def rule_name(rule: Rule) -> str:
    """Returns the name of a rule; a lossy rule is marked, and has its constants."""
    return (
        type(rule).__name__
        if rule.exact
        else f"{rule!r} (LOSSY: texts do not follow the target's distribution)"
    )


def bare_pair(
    target: TransformerLM,
    draft: TransformerLM | None,
    seed: int,
    mesh: Mesh | None = None,
    draft_devices: int | None = None,
) -> Pair:
    """Makes a pair with random parameters, in the compute dtype and on their devices; it has no
    tokenizer.
    """
    if mesh is not None:
        target = shard_model(target, Layout.tensor_parallel(mesh))
        draft = draft and shard_model(draft, draft_layout(mesh, draft_devices))
    keys = jax.random.split(jax.random.key(seed, impl="threefry2x32"))
    with jax.disable_jit(False):  # one step at a time would take minutes
        target_params, draft_params = (
            model and random_params(model, key) for model, key in zip((target, draft), keys)
        )
    return Pair(
        target=target,
        target_params=target_params,
        draft=draft,
        draft_params=draft_params,
        shards=DataShards(mesh),
    )


def random_params(model: TransformerLM | ShardedModel, key: jax.Array) -> Any:
    """Returns parameters as decoding takes them."""

    def make(key):
        params = jax.tree.map(lambda x: x.astype(model.config.compute_dtype), model.init(key))
        params = decode_weights(params, model.config.compute_dtype, model.config.weight_dtype)
        if isinstance(model, ShardedModel):
            params = jax.lax.with_sharding_constraint(params, model.param_shardings(params))
        return params

    return jax.jit(make)(key)


def read_kv_heads(names: PublicNames | None) -> int | None:
    """Returns the kv heads that all layers of a target share, by its config.json; None without."""
    if names is None:
        return None
    try:
        content = storage.read_json(config_path(names.target))
        return parse_config(names.target, content, names.dtype)[1].kv_heads_of_all
    except (FileNotFoundError, ValueError):  # reading the target says why
        return None


def config_path(name: str) -> epath.Path:
    """Returns the path of a checkpoint's config.json."""
    return find_folder(name)[0] / "config.json"


def config_mesh(config: ExperimentConfig) -> Mesh | None:
    """Returns the mesh of a configuration over all devices of all processes; None for a single
    device.
    """
    fields, known = config.mesh, known_models(config)
    if fields.data * fields.model == 1 and jax.process_count() == 1:
        mesh_axes(1, 1, fields.draft_devices)  # refuses more devices for the draft
        return None
    return make_mesh(
        fields.data,
        fields.model,
        draft_model_parallelism=fields.draft_devices,
        num_kv_heads=known["target"].config.kv_heads_of_all
        if "target" in known
        else read_kv_heads(config.hugging_face),
        rows=config.batch // fields.data,
    )
