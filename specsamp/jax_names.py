"""The experimental parts of JAX that this project uses: any release may change them, and this file
alone names them.

from specsamp.jax_names import pl, pltpu, topologies

A part is imported when it is first used: Pallas takes half a second.
"""

import importlib
import types

SEEN = ("0.10.0", "0.10.2", "0.12.0.1")  # the releases of JAX in which all of them work

PARTS = {
    "compilation_cache": "jax.experimental.compilation_cache.compilation_cache",  # set_cache_dir
    "core": "jax.core",  # Tracer
    "multihost_utils": "jax.experimental.multihost_utils",
    "pl": "jax.experimental.pallas",
    "pltpu": "jax.experimental.pallas.tpu",
    "jaxprs": "jax.extend.core",
    "serialize_executable": "jax.experimental.serialize_executable",
    "topologies": "jax.experimental.topologies",
}


def __getattr__(name: str) -> types.ModuleType:
    if name not in PARTS:
        raise AttributeError(f"module 'specsamp.jax_names' has no attribute {name!r}")
    return importlib.import_module(PARTS[name])
