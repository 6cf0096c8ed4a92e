"""Generate small edits of the kernel templates: other constants, conditions and operators.

mutmut patches Python functions at run time. That does not work for kernels, which the DSL compiles
from their source text and caches by it. Therefore these edits are made in the files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.mutants.edits import ROOT, Edit

FOLDERS = ("templates/common", "templates/sm90", "templates/sm100")

# path prefix -> the tests that run that code in the emulator; the longest prefix counts. Code that
# kernels of both architectures call has tests of both, since flags of one may be all that use it.
FORWARDS = ("test_sm90_forward.py", "test_sm100_forward.py")
BACKWARDS = ("test_sm90_backward.py", "test_sm100_backward.py")
NEAREST = {
    "templates/common/combine.py": ("test_combine.py",),
    "templates/common/exact_sums.py": BACKWARDS,
    "templates/common/fingerprint.py": ("test_fingerprint.py", "test_data_check.py"),
    "templates/common/polynomials.py": ("test_sm100_exp2.py",),
    "templates/common/preprocess.py": (*BACKWARDS, "test_data_check.py"),
    "templates/common/semaphore.py": BACKWARDS,
    "templates/common/work_tile.py": BACKWARDS,
    "templates/common/backward": BACKWARDS,
    "templates/common/lse_in_mma.py": (
        "test_sm90_backward_lse_in_mma.py",
        "test_sm100_backward_lse_in_mma.py",
    ),
    "templates/common": FORWARDS,
    "templates/sm90/backward": ("test_sm90_backward.py",),
    "templates/sm90/backward_alibi": ("test_sm90_backward_alibi.py",),
    "templates/sm90/backward_first_writer": ("test_sm90_backward_first_writer.py",),
    "templates/sm90/backward_shared.py": ("test_sm90_backward.py", "test_sm90_backward_packed.py"),
    "templates/sm90/backward_one_hot": ("test_sm90_backward_one_hot.py",),
    "templates/sm90/backward_hd192": ("test_sm90_backward_hd192.py",),
    "templates/sm90/backward_hd256": ("test_sm90_backward_hd256.py",),
    "templates/sm90/backward_hd256_roles": (
        "test_sm90_backward_hd256_roles.py",
        "test_sm90_backward_hd256.py",
    ),
    "templates/sm90/backward_hd512": ("test_sm90_backward_hd512.py",),
    "templates/sm90/backward_producer.py": (
        "test_sm90_backward.py",
        "test_sm90_backward_packed.py",
        "test_sm90_backward_hd256.py",
    ),
    "templates/sm90/backward_lse_in_mma": ("test_sm90_backward_lse_in_mma.py",),
    "templates/sm90/forward_hd512": ("test_sm90_forward_hd512.py",),
    "templates/sm90/slope_in_mma.py": ("test_sm90_slope_in_mma.py",),
    "templates/sm90": ("test_sm90_forward.py",),
    "templates/sm100/backward": ("test_sm100_backward.py",),
    "templates/sm100/backward_2cta": ("test_sm100_backward_2cta.py",),
    "templates/sm100/backward_streamed": ("test_sm100_wide_heads.py",),
    "templates/sm100/backward_lse_in_mma": ("test_sm100_backward_lse_in_mma.py",),
    "templates/sm100/exp2.py": ("test_sm100_exp2.py",),
    "templates/sm100": ("test_sm100_forward.py",),
}

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//",
    ast.BitAnd: "|", ast.BitOr: "&", ast.LShift: ">>", ast.RShift: "<<",
}  # fmt: skip
NAMES = {"fmax": "fmin", "fmin": "fmax", "max": "min", "min": "max"}


def nearest_tests(path: str) -> tuple[str, ...]:
    """Return the tests that run the code in a template file, as arguments for pytest."""
    prefix = max((p for p in NEAREST if path.startswith(p)), key=len)
    return tuple(f"tests/templates/{name}" for name in NEAREST[prefix])


def kernel_edits(root: Path = ROOT) -> Iterator[Edit]:
    """Yield every edit of every kernel template."""
    for folder in FOLDERS:
        for file in sorted((root / folder).glob("*.py")):
            path = f"{folder}/{file.name}"
            yield from edits_of(file.read_text(), path, nearest_tests(path))


def edits_of(source: str, path: str, tests: tuple[str, ...]) -> Iterator[Edit]:
    """Yield the edits of all functions in a file."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    encoded = source.encode()

    def at(line: int, column: int) -> int:
        return len(encoded[: starts[line - 1] + column].decode())

    def edit(node: ast.AST, start: int, end: int, text: str) -> Edit:
        line = getattr(node, "lineno", 0)
        shown = " ".join(source[start:end].split())[:40]
        return Edit(f"{path}:{line}: {shown} -> {text.strip()}", path, start, end, text, tests)

    def span(node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)

    for node in _in_functions(ast.parse(source)):
        if (
            isinstance(node, ast.Compare)
            and len(node.ops) == 1
            and type(node.ops[0]) in COMPARISONS
        ):
            yield edit(node, span(node.left)[1], span(node.comparators[0])[0],
                       f" {COMPARISONS[type(node.ops[0])]} ")  # fmt: skip
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            between = source[span(node.left)[1] : span(node.right)[0]]
            if "(" not in between and ")" not in between:
                yield edit(node, span(node.left)[1], span(node.right)[0],
                           f" {OPERATORS[type(node.op)]} ")  # fmt: skip
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield edit(node, *span(node), source[slice(*span(node.operand))])
        elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
            yield edit(node, *span(node), repr(node.value + 1))
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            end = span(node)[1]
            yield edit(node, end - len(node.attr), end, NAMES[node.attr])
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield edit(node, *span(node), "pass")  # a wait, an arrival, a fence, a store


def _in_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of all function bodies except annotations, docstrings and raised errors."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name != "__post_init__":
            for statement in node.body:
                yield from _below(statement)


def _below(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.FunctionDef | ast.Raise | ast.Assert | ast.JoinedStr):
        return  # a function inside of another is visited by itself
    if isinstance(node, ast.AnnAssign):
        if node.value is not None:
            yield from _below(node.value)
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _below(child)
