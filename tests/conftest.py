"""Eight CPU devices, full-precision products, strict rank promotion: before any backend starts."""

import gc
import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # of processes that tests start; of this one, see `compilation`

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "float32")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_compilation_cache", False)  # nothing outside the checkout is read or written


@pytest.fixture(autouse=True, scope="module")
def compilation(request):
    """A third of the time is the compiler's, for speed that no test needs.

    Modules that run much, or look at compiled programs, say ``OPTIMISED = True``.
    """
    jax.config.update("jax_disable_most_optimizations", not getattr(request.module, "OPTIMISED", False))


# Every compiled program is mapped into memory, and Linux allows a process 65,530 mappings: beyond, XLA aborts.
MOST_MAPPINGS = 30_000


@pytest.fixture(autouse=True)
def few_mappings():
    """Forgets compiled programs before there are too many; only time is lost."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPPINGS:
        jax.clear_caches()
        gc.collect()
