"""gpt-oss: MXFP4 is read exactly, odd blocks are refused, and its kind of chat template renders."""

import datetime
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specsamp import TransformerLM
from specsamp.checkpoints.chat import ChatTemplate
from specsamp.checkpoints.hugging_face import open_checkpoint, read_params
from specsamp.mesh.layout import Layout, make_mesh
from specsamp.mesh.sharded import shard_model
from specsamp.models.int8 import decode_weights, is_int8
from support import extras, golden
from support.refusals import refusal

OF_LAYER = "model.layers.{}.mlp.experts.{}"
WIDTH, INNER, EXPERTS = 32, 64, 4


def unpack(blocks, scales):
    """Returns the numbers by the definition of e2m1: sign, two exponent bits, one mantissa bit."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    sign = 1.0 - 2 * (codes >> 3)
    exponent = codes >> 1 & 3
    bit = codes & 1
    size = np.where(exponent == 0, bit / 2, (1 + bit / 2) * 2.0 ** (exponent.astype(int) - 1))
    values = sign * size * 2.0 ** (scales.astype(float) - 127)[..., None]
    return values.reshape(*scales.shape[:-1], -1)


def write_packed(folder, ends=(30, 200)):
    """Writes the golden model with random experts in MXFP4; returns these by parameter."""
    golden.read("gpt_oss").write_checkpoint(folder)
    rng, experts = np.random.default_rng(0), {}
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        found = {}
        for name, rows, inputs in (("gate_up_proj", 2 * INNER, WIDTH), ("down_proj", WIDTH, INNER)):
            del tensors[OF_LAYER.format(layer, name)]
            shape = EXPERTS, rows, inputs // 32
            blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
            scales = rng.integers(118, 124, shape, dtype=np.uint8)
            scales[0, :2, 0] = ends
            tensors[OF_LAYER.format(layer, name) + "_blocks"] = blocks
            tensors[OF_LAYER.format(layer, name) + "_scales"] = scales
            found[name] = unpack(blocks, scales)
        gate_up = found["gate_up_proj"]
        down = found["down_proj"].swapaxes(1, 2)
        experts[layer] = dict(gate=gate_up[:, ::2], up=gate_up[:, 1::2], down=down)
    save_file(tensors, folder / "model.safetensors")
    content = golden.read("gpt_oss").config | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(content))
    return experts


def is_as_read(params, experts):
    for layer, of_layer in experts.items():
        for name, expected in of_layer.items():
            found = params[f"layer_{layer}"]["experts"][name]
            np.testing.assert_array_equal(np.asarray(found, np.float64), expected)


def test_blocks_are_read_exactly_also_in_parts(tmp_path):
    """Each of four devices has 16 entries of an expert's width, half of a group."""
    experts = write_packed(tmp_path, ends=(0, 250))
    checkpoint = open_checkpoint(tmp_path, dtype="bfloat16")
    model = TransformerLM(checkpoint.config)
    is_as_read(read_params(checkpoint, model), experts)
    sharded = shard_model(model, Layout.tensor_parallel(make_mesh(2, 4)))
    params = read_params(checkpoint, sharded)
    down = params["layer_0"]["experts"]["down"]
    assert down.addressable_shards[0].data.shape == (EXPERTS, INNER // 4, WIDTH)
    is_as_read(params, experts)


def test_blocks_are_quantised_while_they_are_read(tmp_path):
    write_packed(tmp_path)
    whole = open_checkpoint(tmp_path, dtype="float32")
    params = jax.tree.map(np.asarray, read_params(whole, TransformerLM(whole.config)))
    checkpoint = open_checkpoint(tmp_path, dtype="float32", weight_dtype="int8")
    read = read_params(checkpoint, TransformerLM(checkpoint.config))
    assert is_int8(read["layer_0"]["experts"]["gate"])
    jax.tree.map(np.testing.assert_array_equal, read, decode_weights(params, jnp.float32, "int8"))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda blocks, scales: (blocks[..., :15], scales), r"\(4, 32, 2, 15\) is not MXFP4"),
        (lambda blocks, scales: (blocks, scales.astype("f4")), r"got \('F32', \(4, 32, 2\)\)"),
        (lambda blocks, scales: (blocks, None), "beside it must be _scales in U8.* got None"),
        (
            lambda blocks, scales: (blocks[:, :, :1], scales[:, :, :1]),
            r"another shape than config.json says: .*down_proj_blocks \(4, 32, 32\)",
        ),
        (
            lambda blocks, scales: (blocks, np.full_like(scales, 255)),
            "down_proj_blocks.* infinite or NaN",
        ),
    ],
)
def test_odd_blocks_are_refused_in_one_line(change, message, tmp_path):
    write_packed(tmp_path)
    file = tmp_path / "model.safetensors"
    name = OF_LAYER.format(0, "down_proj")
    tensors = load_file(file)
    blocks, scales = change(tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales"))
    tensors[f"{name}_blocks"] = np.ascontiguousarray(blocks)
    if scales is not None:
        tensors[f"{name}_scales"] = np.ascontiguousarray(scales)
    save_file(tensors, file)
    with refusal(message):
        checkpoint = open_checkpoint(tmp_path)
        read_params(checkpoint, TransformerLM(checkpoint.config))


# Like the template of gpt-oss: recursive macros, a date, namespaces, calls of tools.
TEMPLATE = """
{%- macro type_of(spec) -%}
  {%- if spec.type == "object" -%}
    { {%- for name, one in spec.properties.items() -%}
      {{ name }}{{ "" if name in spec.required else "?" }}: {{ type_of(one) }}
      {%- if not loop.last %}, {% endif -%}
    {%- endfor -%} }
  {%- elif spec.enum is defined -%}{{ spec.enum | map("tojson") | join(" | ") }}
  {%- else -%}{{ spec.type }}{%- endif -%}
{%- endmacro -%}
{%- set seen = namespace(tools=false) -%}
<|start|>system<|message|>Current date: {{ strftime_now("%Y-%m-%d") }}
{%- if model_identity is not defined %} by default{% endif -%}
<|end|>
{%- for tool in tools or [] -%}
  {%- set seen.tools = true -%}
  type {{ tool.function.name }} = (_: {{ type_of(tool.function.parameters) }}) => any;
{%- endfor -%}
{%- for message in messages -%}
  {%- if message.role == "assistant" and message.thinking is defined -%}
    <|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>
  {%- endif -%}
  {%- if message.tool_calls is defined -%}
    {%- if message.tool_calls | length != 1 -%}{{ raise_exception("one call") }}{%- endif -%}
    to=functions.{{ message.tool_calls[0]["function"].name }}<|message|>
    {{- message.tool_calls[0].function.arguments | tojson }}<|call|>
    {%- continue -%}
  {%- endif -%}
  <|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}
"""


@extras.needs("jinja2")
def test_template_like_gpt_oss_is_rendered():
    unit = {"type": "string", "enum": ["C", "F"]}
    properties = {"city": {"type": "string"}, "unit": unit}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    call = {"function": {"name": "weather", "arguments": {"city": "Köln"}}}
    talk = [
        {"role": "user", "content": "Warm?"},
        {"role": "assistant", "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "20"},
    ]
    template = ChatTemplate(path="here", source=TEMPLATE)
    assert template.render(talk, tools=[tool]) == (
        f"<|start|>system<|message|>Current date: {datetime.date.today()} by default<|end|>"
        'type weather = (_: {city: string, unit?: "C" | "F"}) => any;'
        "<|start|>user<|message|>Warm?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Hm.<|end|>"
        'to=functions.weather<|message|>{"city": "Köln"}<|call|>'
        "<|start|>tool<|message|>20<|end|><|start|>assistant"
    )
    assert "by default" not in template.render(talk, model_identity="me")
