"""Splits the rows of a batch over the mesh axis ``data``.

Rows are independent, so each shard runs its own loop. All shards end in the same round: the
compiler may emit collectives over all devices, which hang unless all devices run the same rounds.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Array = jax.Array

DATA = "data"
BY_ROWS, REPLICATED = PartitionSpec(DATA), PartitionSpec()


@dataclasses.dataclass(frozen=True)
class DataShards:
    """The data shards of a mesh; without a mesh, one shard with the whole batch. Static and
    hashable.
    """

    mesh: Mesh | None = None

    @property
    def count(self) -> int:
        """Returns the number of shards, which divides every batch."""
        return 1 if self.mesh is None else self.mesh.shape[DATA]

    def map(self, function: Callable, in_specs: tuple[PartitionSpec, ...]) -> Callable:
        """Returns ``function`` mapped over the shards; the leading axis of every leaf of its result
        must be the batch.

        Args:
          function: of arguments whose leaves are split along the batch (`BY_ROWS`) or not at all
            (`REPLICATED`).
          in_specs: `BY_ROWS` or `REPLICATED` for each argument.
        """
        if self.count == 1:
            return function
        if jax.config.jax_disable_jit:
            raise ValueError(
                "rows cannot be split over devices without jit: unset JAX_DISABLE_JIT, or use "
                "data=1"
            )
        return jax.shard_map(
            function,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=BY_ROWS,
            axis_names={DATA},
            check_vma=False,
        )

    def any(self, shard: Array) -> Array:
        """Returns, within a mapped function, whether a bool is true on any shard."""
        return shard if self.count == 1 else jax.lax.pmax(shard.astype(jnp.int32), DATA) > 0

    def max(self, shard: Array) -> Array:
        """Returns, within a mapped function, the maximum of a number over all shards."""
        return shard if self.count == 1 else jax.lax.pmax(shard, DATA)

    def sum(self, shard: Array) -> Array:
        """Returns, within a mapped function, the sum of a number over all shards."""
        return shard if self.count == 1 else jax.lax.psum(shard, DATA)

    def replicate(self, tree: Any) -> Any:
        """Replicates, within a mapped function, arrays that the compiler may have split over the
        devices of a shard.
        """
        if self.mesh is None:
            return tree
        return constrain(
            tree, jax.tree.map(lambda _: NamedSharding(self.mesh, PartitionSpec()), tree)
        )


def constrain(tree: Any, shardings: Any) -> Any:
    """Applies `jax.lax.with_sharding_constraint`, also inside `jax.shard_map`, which has another
    mesh.
    """
    if not jax.sharding.get_abstract_mesh().empty:
        shardings = jax.tree.map(lambda sharding: sharding.spec, shardings)
    return jax.lax.with_sharding_constraint(tree, shardings)
