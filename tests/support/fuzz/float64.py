"""Models and sampling in float64, so that rounding never makes two texts differ."""

import os


def use_float64():
    """Makes JAX's float32 and the compute dtype of transformers float64.

    Call it before the package is imported.
    """
    os.environ["JAX_ENABLE_X64"] = "1"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_disable_most_optimizations", True)
    jnp.float32 = jnp.float64
    from specsamp.models.config import TransformerConfig
    from specsamp.sampling import warp

    warp._integer_of = lambda x: jnp.int32 if x.dtype.itemsize == 4 else jnp.int64
    TransformerConfig.compute_dtype = property(lambda config: jnp.dtype("float64"))
