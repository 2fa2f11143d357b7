"""Eight CPU devices, full-precision products, strict rank promotion: before any backend starts."""

import atexit
import gc
import importlib.metadata
import itertools
import os
import shutil
import tempfile

# One session, its workers and the scripts that tests start share compiled programs; no later
# session does.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="specsamp-tests-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "true"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["SPECSAMP_CPU_KERNEL"] = "0"  # each command would build it in its own folder
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
# For processes that tests start; for this one, see `compilation`.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"

# OPTIMISED modules (below) are compiled at LLVM's first level: their code runs as fast as at the
# third, and takes a quarter less time to make. XLA's own passes, and so the programs that tests
# examine, are the same at every level.
XLA_FLAGS = ["--xla_backend_optimization_level=1", "--xla_llvm_disable_expensive_passes=true"]
# The CPU compiler's newer emitters of fusions take a third of a compilation's time; later releases
# have only these. Modules in parts for many cores take longer in total, and two workers have no
# spare core.
if importlib.metadata.version("jax").startswith("0.10."):
    XLA_FLAGS += ["--xla_cpu_use_fusion_emitters=false", "--xla_cpu_parallel_codegen_split_count=1"]
# Replaces the user's flags, which may set another number of devices.
os.environ["XLA_FLAGS"] = " ".join(XLA_FLAGS)

gc.set_threshold(100_000, 20, 50)  # tracing makes millions of small objects, and hardly a cycle

import jax
import pytest

from support import durations, extras, programs

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "float32")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_addoption(parser):
    parser.addoption(
        "--complete", action="store_true", help="Fail where a package is missing that a test needs."
    )
    parser.addoption("--slow", action="store_true", help="Run the tests that are marked slow, too.")
    parser.addoption(
        "--record_durations",
        action="store_true",
        help="Write how long tests took to tests/durations.json.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Sets two workers, if pytest-xdist is installed and the command line sets no number."""
    # Workers that start workers would never end.
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if (
        config.pluginmanager.hasplugin("xdist")
        and config.option.numprocesses is None
        and not config.option.usepdb
    ):
        config.option.numprocesses = 2
        config.option.dist = "worksteal"


def pytest_configure(config):
    if config.getoption("complete") and extras.MISSING:
        raise pytest.UsageError(
            f"missing: {', '.join(extras.MISSING)}. Install them: pip install -e .[test]"
        )
    if config.getoption("record_durations") and "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(
            durations.Recorder(complete=config.getoption("slow") and not chosen(config))
        )


def chosen(config):
    """Returns whether the command line chooses among the tests."""
    return config.args != config.getini("testpaths") or bool(
        config.option.keyword or config.option.markexpr
    )


left_out = pytest.StashKey[int]()


def pytest_collection_modifyitems(config, items):
    """Deselects slow tests, except by ``--slow``, a test's own name, or an expression of marks."""
    if config.getoption("slow") or "slow" in config.option.markexpr:
        return
    named = {arg.partition("::")[2].partition("[")[0] for arg in config.args}
    slow = [
        item for item in items if item.get_closest_marker("slow") and item.originalname not in named
    ]
    if slow:
        items[:] = [item for item in items if item not in set(slow)]
        config.hook.pytest_deselected(items=slow)
    config.stash[left_out] = len(slow)
    if hasattr(config, "workeroutput"):
        config.workeroutput["left_out"] = len(slow)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Keeps a worker's number of deselected slow tests: each worker collects all tests."""
    node.config.stash[left_out] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_terminal_summary(terminalreporter, config):
    """Prints which tests were left out: slow tests, and tests of missing packages."""
    if config.stash.get(left_out, 0):
        terminalreporter.write_line(f"left out without --slow: {config.stash[left_out]} slow tests")
    for name, what in extras.MISSING.items():
        terminalreporter.write_line(f"left out without {name} (pip install -e .[test]): {what}")


@pytest.fixture(autouse=True, scope="module")
def compilation(request):
    """Turns off most optimisations: they take a third of the time, for speed that no test needs.

    Modules that compute much, or examine compiled programs, set ``OPTIMISED = True``.
    """
    jax.config.update(
        "jax_disable_most_optimizations", not getattr(request.module, "OPTIMISED", False)
    )


TESTS_PER_COUNT = 10  # counting programs takes up to 50 ms, as long as many tests
finished = itertools.count(1)


@pytest.fixture(autouse=True)
def few_programs():
    """Clears compiled programs before there are too many; only time is lost."""
    yield
    if next(finished) % TESTS_PER_COUNT == 0:
        programs.forget_if_many()
