"""Arrays with an entry for each slot are written by the functions that drop what does not fit, and
by no others.
"""

import ast
import pathlib

import specsamp

PACKAGE = pathlib.Path(specsamp.__file__).parent
WRITERS = {
    "dynamic_update_slice",
    "dynamic_update_slice_in_dim",
    "dynamic_update_index_in_dim",
    "scatter",
    "scatter_add",
    "put_along_axis",
}
# Of ``x.at[...]``.
UPDATES = {"set", "add", "subtract", "multiply", "mul", "divide", "min", "max", "power", "apply"}
# Functions that write to parts of arrays: how often, and why nothing can move.
ALLOWED = {
    "models/slots.py: write_slots.write": (1, "the helper"),
    "decoding/batch_rows.py: _write_rows.write": (1, "rows, whose indices `insert` checks"),
    "decoding/drafters/block_head.py: BlockDrafter.propose.step": (1, "an offset below K"),
    "decoding/drafters/early_exit.py: self_draft.step": (1, "an offset below K"),
    "decoding/drafters/feature.py: FeatureDrafter.propose.draw": (1, "an offset below K"),
    "decoding/drafters/ngram.py: NgramDrafter.prepare": (1, "hashes below the size"),
    "decoding/drafters/ngram.py: NgramDrafter._write.write": (2, "drops places that are not used"),
    "decoding/drafters/parallel.py: ParallelDrafter.propose.step": (1, "an offset below K"),
    "decoding/drafters/translating.py: TranslatingDrafter.propose.step": (1, "an offset below K"),
    "decoding/drafters/beam.py: BeamDrafter._extend": (1, "an offset below K"),
    "decoding/sampler.py: Sampler.draw": (1, "an offset below K"),
    "decoding/drafters/translating.py: TranslatingDrafter.init": (
        1,
        "the first slots of an empty text",
    ),
    "decoding/drafters/translating.py: TranslatingDrafter._append": (
        2,
        "drops ids that do not fit",
    ),
    "sampling/tree_rules.py: RecursiveRule.walk.visit": (1, "levels of a tree; drops the last"),
    "sampling/tree_rules.py: _Traversal.start": (1, "the first row of a tree"),
    "sampling/tree_rules.py: _put": (2, "rows of a tree"),
    "sampling/penalties.py: Penalties.init": (1, "tokens of the vocabulary"),
    "sampling/penalties.py: Penalties.advance": (1, "tokens of the vocabulary"),
    "sampling/penalties.py: Bias.__call__.biased": (1, "tokens of the vocabulary"),
    "models/heads.py: Head.training_weights": (1, "tokens of the vocabulary"),
    "models/products.py: _by_columns": (1, "columns of a product"),
    "models/products.py: _by_columns.put_block": (1, "columns of a product"),
    "models/experts.py: _in_blocks": (1, "tokens of a call"),
    "models/experts.py: _in_blocks.add": (1, "tokens of a call"),
    "models/block_corrections.py: Selector.__call__": (1, "tokens of the vocabulary"),
    "models/block_corrections.py: GroupedConvolution.__call__.first_tap": (1, "a constant"),
    "checkpoints/vocabulary.py: shared_mass": (1, "a constant"),
}


def writes(tree):
    """Yields the qualified name of the function and the line of each write."""

    def visit(node, function):
        for child in ast.iter_child_nodes(node):
            inner = function
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
                inner = f"{function}.{child.name}" if function else child.name
            if isinstance(child, ast.Call) and is_write(child.func):
                yield inner, child.lineno
            yield from visit(child, inner)

    yield from visit(tree, "")


def is_write(function):
    """Returns whether a call of this function writes to a part of an array."""
    if isinstance(function, ast.Name):
        return function.id in WRITERS
    if not isinstance(function, ast.Attribute):
        return False
    is_update = (
        function.attr in UPDATES
        and isinstance(function.value, ast.Subscript)
        and isinstance(function.value.value, ast.Attribute)
        and function.value.value.attr == "at"
    )
    return is_update or function.attr in WRITERS


def found():
    places = {}
    for folder in ("decoding", "models", "sampling", "serving", "checkpoints", "mesh"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            for function, line in writes(ast.parse(path.read_text())):
                places.setdefault(f"{name}: {function}", []).append(line)
    return places


def test_slots_are_written_by_the_helpers_alone():
    """Other writes are listed with a reason. Kernels are left out: each has a test at the borders
    of its arrays.
    """
    counts = {place: len(lines) for place, lines in found().items()}
    assert counts == {place: count for place, (count, _) in ALLOWED.items()}


def test_a_write_of_every_kind_is_seen():
    code = """
def f(x):
    def g(y):
        return jax.lax.dynamic_update_slice(x, y, (0,))
    x = x.at[0].set(1)
    return jax.lax.dynamic_update_index_in_dim(x, g(x), 0, axis=0)
class C:
    def h(self, x):
        return dynamic_update_slice(x, x, (0,))
"""
    assert list(writes(ast.parse(code))) == [("f.g", 4), ("f", 5), ("f", 6), ("C.h", 9)]
