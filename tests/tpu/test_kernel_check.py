"""The table of kernels and their plain forms: every kernel is in it, each call reaches its kernel,
and compiles.
"""

import functools
import pathlib
import re

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from specsamp.jax_names import pl
from specsamp.models import kernels as folder
from specsamp.models.kernels.common import SMALL
from specsamp.models.kernels.dispatch import PallasKernels
from specsamp.tpu.kernel_check import CHECKS
from specsamp.tpu.topology import described_mesh, topology_of
from support import extras

each_check = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)


def test_every_kernel_of_the_folder_has_a_check():
    """Kernels are named by constants in the files that call Pallas."""
    names = set()
    for path in pathlib.Path(folder.__file__).parent.glob("*.py"):
        text = path.read_text()
        if "pallas_call(" in text:
            found = re.findall(r'^[A-Z]+ = "(\w+)"', text, re.MULTILINE)
            assert found, f"{path.name} names no kernel"
            names |= {*found}
    assert names == {check.kernel for check in CHECKS}


@each_check
def test_kernel_check_calls_kernel_and_plain_form(check, monkeypatch):
    called, pallas_call = set(), pl.pallas_call
    monkeypatch.setattr(
        pl,
        "pallas_call",
        lambda *args, name, **options: called.add(name) or pallas_call(*args, name=name, **options),
    )
    operands = check.draw()
    jax.eval_shape(functools.partial(check.compute, None), *operands)
    assert not called
    jax.eval_shape(functools.partial(check.compute, PallasKernels(interpret=True)), *operands)
    assert called == {check.kernel}


# For vectors of norms, Pallas uses the default device, a CPU here: test_kernels.py compiles these
# kernels in models.
LARGE = [check for check in CHECKS if check.kernel != SMALL]


@pytest.mark.slow
@extras.needs("libtpu")
@pytest.mark.parametrize("check", LARGE, ids=lambda check: check.name)
def test_a_check_compiles_for_a_chip(check):
    one = SingleDeviceSharding(described_mesh("v5e:1x1").devices.flat[0])
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), check.draw()
    )
    compute = jax.jit(functools.partial(check.compute, PallasKernels()))
    assert f"/{check.kernel}/" in compute.lower(*shapes).compile().as_text()


@extras.needs("libtpu")
@pytest.mark.parametrize(
    "topology",
    ["v3:2x2", "v4:1x1x1", "v4:2x2x2", "v5e:1x1", "v5e:2x4", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"],
)
def test_devices_say_their_topology(topology):
    assert topology_of(list(described_mesh(topology).devices.flat)) == topology
