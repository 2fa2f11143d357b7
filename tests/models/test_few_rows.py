"""The CPU kernel for few rows: results, products that stay with XLA, threads, reasons to stay
off.
"""

import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specsamp import Pair, TransformerLM, generate
from specsamp.models import few_rows
from specsamp.models.config import tiny
from specsamp.models.int8 import Int8Blocks, quantise
from specsamp.models.products import contract
from support.weights import drawn_params

SPEC = "BTD,DX->BTX"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Yields the path of the kernel, which is built once for this file."""
    folder = tmp_path_factory.mktemp("kernel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(few_rows, "use_compilation_cache", lambda: str(folder))
        patch.setattr(few_rows, "_target", None)
        patch.delenv(few_rows.SWITCH, raising=False)
        assert "by a kernel" in few_rows.build()
        assert [path.suffix for path in folder.iterdir()] == [".so", ".so"], "and nothing half made"
        yield folder / few_rows.kernel_name()


@pytest.fixture
def used(library, monkeypatch):
    monkeypatch.setattr(few_rows, "_target", library.stem)


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32))


def calls_of(function, *arguments):
    """Counts the kernel's calls in the program of a CPU."""
    return jax.jit(function).lower(*arguments).as_text().count(f"@{few_rows._target}")


@pytest.mark.parametrize("rows", [1, 2, 16, 17])
@pytest.mark.parametrize("dtype", ["float32", "int8", "bfloat16"])
def test_products_take_it_for_few_rows(used, rows, dtype):
    x_BTD, y_DX = drawn(1, rows, 24), drawn(24, 40)
    if dtype == "bfloat16":
        x_BTD = x_BTD.astype(dtype)
    if dtype == "int8":
        y_DX = quantise(y_DX, (0,))
        y_DX = Int8Blocks(y_DX.values, y_DX.scale)
    few = {"float32": 2 <= rows <= 16, "int8": rows <= 16, "bfloat16": False}[dtype]
    assert calls_of(lambda x: contract(SPEC, x, y_DX), x_BTD) == few
    expected = x_BTD.astype(jnp.float32) @ (y_DX.values * y_DX.scale if dtype == "int8" else y_DX)
    tolerance = 0.1 if dtype == "bfloat16" else 1e-4
    np.testing.assert_allclose(
        contract(SPEC, x_BTD, y_DX).astype(jnp.float32), expected, atol=tolerance
    )


def test_training_and_vmap_keep_xlas_product(used):
    x_BTD, y_DX = drawn(1, 4, 24), drawn(24, 40)
    assert calls_of(lambda x: contract(SPEC, x, y_DX), x_BTD) == 1
    assert calls_of(jax.grad(lambda y: contract(SPEC, x_BTD, y).sum()), y_DX) == 0
    each = jax.vmap(lambda x: contract(SPEC, x, y_DX))
    assert calls_of(each, x_BTD[None]) == 0
    np.testing.assert_allclose(each(x_BTD[None])[0], contract(SPEC, x_BTD, y_DX), atol=1e-4)


def test_greedy_texts_equal_plain_decoding(library, monkeypatch):
    def lm(width):
        return TransformerLM(
            tiny(vocab_size=32, width=width, num_layers=2, num_heads=2, positions="rotary"), "cpu"
        )

    pair = Pair(
        target=lm(32),
        target_params=drawn_params(lm(32), 0),
        draft=lm(16),
        draft_params=drawn_params(lm(16), 1),
    )
    texts = []
    for target in (None, library.stem):
        monkeypatch.setattr(few_rows, "_target", target)
        jax.clear_caches()
        found = generate(pair, [[1, 2, 3], [4]], 24, draft_length=3, stop=[])
        texts.append([text.tokens for text in found])
    assert texts[0] == texts[1]
    jax.clear_caches()


def test_one_thread_and_eight_devices_finish(library):
    """A handler that blocked on a task that the pool has not begun would block forever."""
    code = """
import jax, numpy as np
from specsamp.models import few_rows
few_rows.build()
assert few_rows.kernel_name(), few_rows.build()
multiply = jax.jit(few_rows.multiply)
x, y = np.ones((4, 256), np.float32), np.ones((256, 2048), np.float32)
placed = [jax.device_put((x, y), device) for device in jax.devices()]
assert len(placed) == 8
for _ in range(20):
    for result in [multiply(*each) for each in placed]:
        assert (np.asarray(result) == 256).all()
"""
    flags = "--xla_force_host_platform_device_count=8"
    environment = os.environ | {
        few_rows.SWITCH: "1",
        "XLA_FLAGS": flags,
        "JAX_COMPILATION_CACHE_DIR": str(library.parent),
    }
    command = [
        sys.executable,
        "-c",
        f"import os; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])\n{code}",
    ]
    subprocess.run(command, env=environment, timeout=120, check=True)


@pytest.mark.parametrize(
    "name, value, match",
    [
        (few_rows.SWITCH, "0", "SPECSAMP_CPU_KERNEL=0"),
        ("CXX", "no-such-compiler", "no C.. compiler"),
        ("CXX", "false", "false failed"),
        ("folder", None, "not kept in a folder"),
        ("folder", "gs://bucket/cache", "not kept in a folder"),
        ("folder", "/dev/null/cache", "Not a directory"),
        ("FLAGS", ("-fno-such-flag",), "fno-such-flag"),
        ("SECONDS", 0.001, "timed out"),
    ],
)
def test_few_rows_kernel_stays_off_with_reason(monkeypatch, tmp_path, name, value, match):
    folder = value if name == "folder" else str(tmp_path)
    monkeypatch.setattr(few_rows, "use_compilation_cache", lambda: folder)
    monkeypatch.setattr(few_rows, "_target", None)
    monkeypatch.delenv(few_rows.SWITCH, raising=False)
    if hasattr(few_rows, name):
        monkeypatch.setattr(few_rows, name, value)
    elif name != "folder":
        monkeypatch.setenv(name, value)
    said = few_rows.build()
    assert said.startswith("XLA's products of few rows: ") and "\n" not in said
    assert re.search(match, said), said
    assert not few_rows.kernel_name() and not list(tmp_path.iterdir())
    assert calls_of(lambda x, y: contract(SPEC, x, y), drawn(1, 4, 8), drawn(8, 8)) == 0


def test_a_damaged_library_is_not_used(monkeypatch, tmp_path):
    (tmp_path / "kernel_float32.so").write_text("no library")
    monkeypatch.setattr(few_rows, "_library", lambda: tmp_path / "kernel")
    monkeypatch.setattr(few_rows, "_target", None)
    assert re.search("XLA's products of few rows: .*kernel_float32.so", few_rows.build())
    assert not few_rows.kernel_name()


@pytest.mark.slow
def test_wrong_kernel_is_not_used(monkeypatch, tmp_path):
    wrong = tmp_path / "few_rows.cc"
    wrong.write_text(
        few_rows.SOURCE.read_text().replace("T; t++) total[t][v] += x", "T; t++) total[t][v] -= x")
    )
    monkeypatch.setattr(few_rows, "SOURCE", wrong)
    monkeypatch.setattr(few_rows, "use_compilation_cache", lambda: str(tmp_path))
    monkeypatch.setattr(few_rows, "_target", None)
    monkeypatch.delenv(few_rows.SWITCH, raising=False)
    assert "off by" in few_rows.build()
    assert not few_rows.kernel_name() and not list(tmp_path.glob("*.so"))
