"""Random checkpoints of public shapes."""

from etils import epath

from launch.studies import streaming
from specsamp.checkpoints.safetensors_io import read_header
from support import golden


def test_random_files_with_mxfp4_are_read(tmp_path):
    packed = {"quantization_config": {"quant_method": "mxfp4"}}
    streaming.write_checkpoint(tmp_path, golden.read("gpt_oss").config | packed)
    header = read_header(epath.Path(tmp_path) / "model.safetensors")
    assert [tensor.kind for tensor in header.values()].count("U8") == 8  # blocks and scales
    whole, halves = (streaming.read(tmp_path, dtype) for dtype in (None, "int8"))
    assert 0 < halves["parameters_gb"] < whole["parameters_gb"] < whole["peak_gb"]


def test_a_checkpoint_of_fewer_layers_has_their_windows():
    content = {"text_config": {"layer_types": ["a", "b", "c"], "num_hidden_layers": 3}}
    assert streaming.shortened(content, 2) == {
        "text_config": {"layer_types": ["a", "b"], "num_hidden_layers": 2}
    }
