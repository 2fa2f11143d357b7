"""Arrays with an entry for each slot are written by the functions that drop what does not fit, and by no others."""

import ast
import pathlib

import specsamp

PACKAGE = pathlib.Path(specsamp.__file__).parent
WRITERS = {"dynamic_update_slice", "dynamic_update_slice_in_dim", "dynamic_update_index_in_dim", "scatter"}
UPDATES = {"set", "add", "multiply", "mul", "divide", "min", "max", "power", "apply"}  # of ``x.at[...]``
# Functions that write elsewhere, with the reason why nothing can move.
ALLOWED = {
    "models/slots.py: write": "the helper",
    "decoding/batch_rows.py: write": "rows, whose indices `insert` checks",
    # The token at an offset of a draft, between 0 and K - 1.
    "decoding/drafters/block_head.py: step": "an offset below K",
    "decoding/drafters/early_exit.py: step": "an offset below K",
    "decoding/drafters/feature.py: draw": "an offset below K",
    "decoding/drafters/parallel.py: step": "an offset below K",
    "decoding/drafters/translating.py: step": "an offset below K",
    "decoding/sampler.py: draw": "an offset below K",
    "decoding/drafters/translating.py: init": "the first slots, fewer than there are",
    "decoding/drafters/translating.py: _append": "drops what does not fit",
    # Rows of the tree of a round.
    "sampling/tree_rules.py: visit": "drops what does not fit",
    "sampling/tree_rules.py: _put": "rows of the tree",
    "sampling/tree_rules.py: start": "the first row",
    # Arrays over the vocabulary, or over the weights of a product.
    "sampling/penalties.py": "arrays over the vocabulary",
    "models/heads.py": "arrays over the vocabulary",
    "models/products.py": "columns of a product",
    "models/experts.py": "tokens of a call",
    "models/block_corrections.py": "a constant",
    "checkpoints/vocabulary.py": "a constant",
}


def writes(tree):
    """Yields the name of the innermost function and the line of each write."""

    def visit(node, function):
        for child in ast.iter_child_nodes(node):
            inner = child.name if isinstance(child, ast.FunctionDef) else function
            if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
                is_update = (
                    child.func.attr in UPDATES
                    and isinstance(child.func.value, ast.Subscript)
                    and isinstance(child.func.value.value, ast.Attribute)
                    and child.func.value.value.attr == "at"
                )
                if is_update or child.func.attr in WRITERS:
                    yield inner, child.lineno
            yield from visit(child, inner)

    yield from visit(tree, "")


def found():
    places = {}
    for folder in ("decoding", "models", "sampling", "serving", "checkpoints", "mesh"):
        for path in sorted((PACKAGE / folder).rglob("*.py")):
            name = path.relative_to(PACKAGE).as_posix()
            for function, line in writes(ast.parse(path.read_text(encoding="utf-8"))):
                places.setdefault(f"{name}: {function}", []).append(line)
    return places


def test_slots_are_written_by_the_helpers_alone():
    others = {place: lines for place, lines in found().items() if not is_allowed(place)}
    assert not others, "write slots with specsamp.models.slots, or say in ALLOWED why nothing can move"


def is_allowed(place):
    return place in ALLOWED or place.partition(":")[0] in ALLOWED


def test_allowed_places_exist():
    places = found()
    files = {place.partition(":")[0] for place in places}
    assert not [place for place in ALLOWED if place not in places and place not in files]


def test_a_write_of_every_kind_is_seen():
    code = """
def f(x):
    def g(y):
        return jax.lax.dynamic_update_slice(x, y, (0,))
    x = x.at[0].set(1)
    return jax.lax.dynamic_update_index_in_dim(x, g(x), 0, axis=0)
"""
    assert list(writes(ast.parse(code))) == [("g", 4), ("f", 5), ("f", 6)]
