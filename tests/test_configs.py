"""The paper's experiment and public pairs as configurations: published sizes, and meshes that both
models divide over.
"""

import dataclasses
import pathlib
import tomllib

import jax
import pytest
from jax.sharding import AxisType

from configs import hf
from launch.lib import shapes
from launch.lib.fields import ExperimentConfig
from specsamp import TransformerLM
from specsamp.checkpoints.head_export import write_head
from specsamp.checkpoints.published import CONFIGS, published_config
from specsamp.mesh.layout import Layout, mesh_axes
from specsamp.mesh.sharded import draft_layout, shard_head, shard_model
from specsamp.models.config import tiny
from specsamp.models.heads import DRAFT_IDS, FeatureHead
from specsamp.models.medusa import MedusaConfig
from support.weights import drawn_params, shapes_of

PUBLISHED = tomllib.loads(pathlib.Path(__file__).with_name("published_sizes.toml").read_text())


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_the_published_ones(name):
    config = published_config(name)
    assert TransformerLM(config).num_parameters == pytest.approx(
        PUBLISHED["models"][name], rel=1e-4
    )


def mesh_of(config):
    """Returns an abstract mesh of a configuration's devices."""
    ways = config.mesh.draft_model_parallelism or None
    heads = shapes.known_models(config)["target"].config.kv_heads_of_all
    shape, names = mesh_axes(1, config.mesh.model, ways, heads)
    return jax.sharding.AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


@pytest.mark.parametrize("devices, split", [(4, {"model": 4}), (8, {"replica": 2, "model": 4})])
def test_mesh_splits_fewer_global_kv_heads(devices, split):
    """Gemma 4 31B has 16 kv heads, and 4 in its layers without a window."""
    fields = hf.get_config("google/gemma-4-31B-it")
    fields.mesh.model = devices
    config = ExperimentConfig.from_config_dict(fields)
    assert dict(mesh_of(config).shape) == {"data": 1} | split


@pytest.mark.slow
@pytest.mark.parametrize("name", hf.PAIRS)
def test_both_models_divide_over_their_mesh(name):
    config = ExperimentConfig.from_config_dict(hf.get_config(name))
    pair = hf.PAIRS[name]
    devices = config.mesh.model
    mesh = mesh_of(config)
    target = published_config(pair.target)
    draft = published_config(pair.draft)
    # All layers have the same sizes.
    few = dict(num_layers=2, window=None, global_layers=(), window_rotary_base=None)
    rows = -(-max(target.vocab_size, draft.vocab_size) // devices) * devices
    layouts = (
        Layout.tensor_parallel(mesh),
        draft_layout(mesh, config.mesh.draft_model_parallelism or None),
    )
    for shape, layout in zip((target, draft), layouts):
        model = shard_model(
            TransformerLM(dataclasses.replace(shape, vocab_size=rows, **few)), layout
        )
        params = shapes_of(model.model)
        model.param_shardings(params)
    sizes = [TransformerLM(shape).num_parameters for shape in (target, draft)]
    ways = devices, pair.draft_model_parallelism or devices
    bytes_per_chip = sum(2 * size / count for size, count in zip(sizes, ways))
    assert bytes_per_chip < 12e9  # of a v5e's 16 GiB, with room for caches


@pytest.mark.parametrize("name", ["gemma-27b", "qwen-7b"])
def test_compiled_pair_has_the_larger_vocabulary(name):
    config = ExperimentConfig.from_config_dict(hf.get_config(name))
    sizes = [model.vocab_size for model in shapes.target_and_draft(config)]
    pair = hf.PAIRS[name]
    published = [published_config(one).vocab_size for one in (pair.target, pair.draft)]
    assert sizes == 2 * [max(published)] and len(set(published)) == 2


@pytest.mark.parametrize("name", hf.HEADS)
def test_head_divides_over_the_target_mesh(name):
    """Heads whose sizes are published have them."""
    config = ExperimentConfig.from_config_dict(hf.get_config(name))
    config = config.turned({"int8.weights": "target", "int8.caches": "both"})
    target = shapes.known_models(config)["target"].config
    head = shapes.head_of(config, target)
    made = shapes_of(head.head())
    shard_head(head.head(), Layout.tensor_parallel(mesh_of(config))).param_shardings(made)
    assert target.weight_dtype == "int8" and head.layer.weight_dtype is None
    if name in PUBLISHED["heads"]:
        made.pop(DRAFT_IDS, None)
        size = sum(leaf.size for leaf in jax.tree.leaves(made))
        assert [head.kind, size] == PUBLISHED["heads"][name]


def test_head_kind_is_read_from_its_files(tmp_path):
    target = tiny(num_layers=2, positions="rotary")
    head = FeatureHead(
        MedusaConfig(
            layer=target, target_layers=2, hidden_layers=(2,), own_output=True, num_heads=3
        )
    )
    write_head(tmp_path, head, drawn_params(head), target_name="a-target", K=3)
    config = ExperimentConfig.from_config_dict(hf.get_config(f"a-target,{tmp_path}"))
    found = shapes.head_of(config, target)
    assert found.kind == "Medusa" and found.num_heads == 3
    unknown = config.turned({"hugging_face.draft": "nobody/knows"})
    assert shapes.head_of(unknown, published_config("Qwen/Qwen3-8B")).kind == "EAGLE-3"


def test_only_two_names_form_a_pair():
    config = hf.get_config("runs/target,gs://bucket/draft")
    assert (config.hugging_face.target, config.hugging_face.draft) == (
        "runs/target",
        "gs://bucket/draft",
    )
    for wrong in ("llama", "a,b,c", "a,", ""):
        with pytest.raises(
            ValueError,
            match="choose one of gpt2, .*llama-8b, .* or give a target, alone or with a draft",
        ):
            hf.get_config(wrong)
