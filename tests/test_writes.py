"""Arrays with an entry per slot are written only by functions that drop entries out of range."""

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
# Methods of ``x.at[...]``.
UPDATES = {"set", "add", "subtract", "multiply", "mul", "divide", "min", "max", "power", "apply"}
# Functions that write to parts of arrays, and why nothing can move.
ALLOWED = {
    "models/slots.py: write_slots.write": "the helper",
    "decoding/batch_rows.py: _write_rows.write": "rows, whose indices `insert` checks",
    "decoding/drafters/ngram.py: NgramDrafter.prepare": "hashes below the size",
    "decoding/drafters/ngram.py: NgramDrafter._write.write": "drops places that are not used",
    "decoding/drafters/collective.py: CollectiveDrafter.propose": "the first K tokens of a draft",
    "decoding/drafters/beam.py: BeamDrafter.propose.extend": "an offset below K",
    "decoding/sampler.py: Sampler.draw.put": "an offset below K",
    "decoding/drafters/translating.py: TranslatingDrafter.init": "the first slots of an empty text",
    "decoding/drafters/translating.py: TranslatingDrafter._append": "drops ids that do not fit",
    "sampling/tree_rules.py: RecursiveRule.walk.visit": "levels of a tree; drops the last",
    "sampling/tree_rules.py: _Traversal.start": "the first row of a tree",
    "sampling/tree_rules.py: _put": "rows of a tree",
    "sampling/penalties.py: Penalties.init": "tokens of the vocabulary",
    "sampling/penalties.py: Penalties.advance": "tokens of the vocabulary",
    "sampling/penalties.py: Bias.__call__.biased": "tokens of the vocabulary",
    "models/heads.py: Head.training_weights": "tokens of the vocabulary",
    "models/products.py: _int8_sums.put_columns": "columns of a product",
    "models/experts.py: _in_blocks": "tokens of a call",
    "models/experts.py: _in_blocks.add": "tokens of a call",
    "models/block_corrections.py: Selector.__call__": "tokens of the vocabulary",
    "models/block_corrections.py: GroupedConvolution.__call__.first_tap": "a constant",
    "checkpoints/vocabulary.py: shared_mass": "a constant",
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
    for folder in ("decoding", "models", "sampling", "serving", "checkpoints", "mesh"):
        for path in (PACKAGE / folder).rglob("*.py"):
            for function, _ in writes(ast.parse(path.read_text())):
                yield f"{path.relative_to(PACKAGE).as_posix()}: {function}"


def test_slots_are_written_by_the_helpers_alone():
    """Other writes are listed with a reason. Kernels are not, since each has a test at the borders
    of its arrays.
    """
    assert {*found()} == ALLOWED.keys()


def test_writes_of_every_kind_are_found():
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
