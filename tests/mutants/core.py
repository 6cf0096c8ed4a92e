"""Run mutmut on the core (`[tool.mutmut]` in pyproject.toml) and read its results.

Some mutants say nothing about the tests; `wasted` leaves them out. Those that no test can notice,
since they compute the same, are listed in equivalent.toml; `outcome` reports them by themselves.
Those that no test detects but mypy refuses are noticed too, since every commit passes `make lint`.
"""

from __future__ import annotations

import ast
import json
import random
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from tests.mutants.edits import ROOT
from tests.mutants.type_checks import checker

SURVIVED, UNCOVERED, NOT_RUN = 0, 33, None  # exit statuses in mutmut's files; others are kills
NO_MUTANT = "no_such_mutant"
PREPARED = "nothing matches"  # part of mutmut's error for a name that no mutant has
EQUIVALENT = Path(__file__).parent / "equivalent.toml"


@dataclass(frozen=True)
class Change:
    """Describe a mutant that computes the same as the code.

    Attributes:
        path: path of the file, relative to the root of the repository.
        function: name of the function, `Class.method` for a method.
        before: the changed lines, without indentation.
        after: what mutmut makes of them.
        reason: why no test can tell them apart.
    """

    path: str
    function: str
    before: str
    after: str
    reason: str = ""


@dataclass(frozen=True)
class Outcome:
    """Hold the results of a mutation run.

    Attributes:
        killed: number of mutants that a test detected or that ran out of time.
        refused: names of the mutants that no test detected, but mypy refuses.
        survivors: names of the mutants that no test detected.
        uncovered: names of the mutants in functions that no test calls.
        equivalent: names of the mutants that equivalent.toml lists.
        wasted: number of mutants that were drawn and did not run.
    """

    killed: int
    survivors: tuple[str, ...]
    uncovered: tuple[str, ...]
    equivalent: tuple[str, ...] = ()
    wasted: int = 0
    refused: tuple[str, ...] = ()

    @property
    def noticed(self) -> int:
        """Return the number of mutants that a test or mypy notices."""
        return self.killed + len(self.refused)


def run(sample: int, seed: int, only: str, children: int) -> Outcome:
    """Draw mutants of the core and run the tests that call each mutated function.

    Args:
        sample: number of mutants to draw; 0 for all.
        seed: seed of the draw.
        only: draw only mutants whose name contains this.
        children: number of processes that run in parallel.
    """
    # writes the mutants, and finds out which test calls what
    errors = _mutmut([NO_MUTANT], children)
    if PREPARED not in errors:
        raise RuntimeError(f"mutmut failed before it ran a mutant; its output says why. {errors}")
    names = sorted(name for name, _ in statuses() if only in name)
    if sample:
        names = random.Random(seed).sample(names, min(sample, len(names)))
    some = [name for name in sorted(names) if not wasted(name)]
    if some:
        sys.stderr.write(_mutmut(some, children))
    return outcome(some, len(names) - len(some))


def wasted(name: str, root: Path = ROOT) -> bool:
    """Return whether a mutant says nothing about the tests.

    That is so in three cases:

    - The function runs only while its module is imported, as those that fill a table of handlers.
      mutmut switches a mutant on later, when the table holds the results of the code.
    - Only the text of an error changes: mutmut writes "XX" around it or makes it upper-case. Tests
      check what is refused and what a message names, not its wording.
    - Only an assertion changes, which never fails: the text of an AssertionError, or the argument
      `strict=True` of `zip`.
    """
    path, function = location(name)
    if function in import_only((root / path).read_text()):
        return True
    key = name.rpartition(".")[2]
    mutants = _functions(root / "mutants" / path)
    original = mutants[key.rpartition("__mutmut_")[0] + "__mutmut_orig"]
    equal_lengths = "strict=False" not in ast.unparse(original)
    return _compared(mutants[key], equal_lengths) == _compared(original, equal_lengths)


def definition(name: str, root: Path = ROOT) -> str:
    """Return the text of the function that a mutant is."""
    file = root / "mutants" / location(name)[0]
    function = _functions(file)[name.rpartition(".")[2]]
    lines = file.read_text().splitlines(keepends=True)
    return "".join(lines[function.lineno - 1 : function.end_lineno])


def location(name: str) -> tuple[str, str]:
    """Return the file of a mutant and its function, `Class.method` for a method."""
    module, _, key = name.rpartition(".")
    kind, mangled = key[:2], key[2:].rpartition("__mutmut_")[0]
    function = mangled.replace("ǁ", ".") if kind == "xǁ" else mangled
    return module.replace(".", "/") + ".py", function


@cache
def import_only(source: str) -> frozenset[str]:
    """Return the private functions of a module that are called only while it is imported."""
    tree = ast.parse(source)
    private = {
        f.name for f in tree.body if isinstance(f, ast.FunctionDef) and f.name.startswith("_")
    }
    calls: dict[str, set[str | None]] = {name: set() for name in private}  # name -> its callers
    for statement in tree.body:
        _collect(statement, None, calls)
    found = {name for name, callers in calls.items() if callers}
    while outside := {name for name in found if not calls[name] <= found | {None}}:
        found -= outside
    return frozenset(found)


def _collect(node: ast.AST, caller: str | None, calls: dict[str, set[str | None]]) -> None:
    """Note who refers to which function. A name that is not called may be called by anyone."""
    if isinstance(node, ast.Name) and node.id in calls:
        calls[node.id].add("anyone")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in calls:
        calls[node.func.id].add(caller)
        parts: list[ast.AST] = [*node.args, *node.keywords]
    elif isinstance(node, ast.FunctionDef | ast.Lambda):
        arguments = node.args  # defaults, and decorators, are evaluated with the definition
        now = [*arguments.defaults, *filter(None, arguments.kw_defaults)]
        for part in (*now, *getattr(node, "decorator_list", ())):
            _collect(part, caller, calls)
        inner = node.name if isinstance(node, ast.FunctionDef) and caller is None else "anyone"
        for part in node.body if isinstance(node.body, list) else [node.body]:
            _collect(part, inner, calls)
        return
    else:
        parts = list(ast.iter_child_nodes(node))
    for part in parts:
        _collect(part, caller, calls)


@lru_cache(maxsize=1)  # names come file by file
def _functions(path: Path) -> dict[str, ast.FunctionDef]:
    tree = ast.parse(path.read_text())
    return {f.name: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}


def _compared(function: ast.FunctionDef, equal_lengths: bool) -> str:
    """Return the code of a function without the texts of its errors and without assertions.

    Args:
        function: the function.
        equal_lengths: whether the arguments of each `zip` are equally long.
    """
    body = ast.parse(ast.unparse(function.body))  # a copy
    for part in ast.walk(body):
        if isinstance(part, ast.Raise) or _called(part) == "fail":
            for text in ast.walk(part):
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    text.value = ""
        if isinstance(part, ast.Call) and _called(part) == "AssertionError":
            part.args = []
        if isinstance(part, ast.Call) and _called(part) == "zip" and equal_lengths:
            part.keywords = []
    return ast.dump(body)


def _called(n: ast.AST) -> str | None:
    """Return the name of the function or method that a call calls; None for other code."""
    if not isinstance(n, ast.Call):
        return None
    return getattr(n.func, "id", getattr(n.func, "attr", None))


def equivalents() -> list[Change]:
    """Return the changes that equivalent.toml lists."""
    return [Change(**entry) for entry in tomllib.loads(EQUIVALENT.read_text())["mutant"]]


def statuses(root: Path = ROOT) -> Iterator[tuple[str, int | None]]:
    """Yield (name, exit status) of each mutant that mutmut generated."""
    for file in sorted((root / "mutants").rglob("*.py.meta")):
        yield from json.loads(file.read_text())["exit_code_by_key"].items()


def outcome(names: Sequence[str], wasted: int = 0, root: Path = ROOT) -> Outcome:
    """Summarize the mutants in `names` that have run, and let mypy check those that survived."""
    found = dict(statuses(root))
    ran = {name: found[name] for name in names if found[name] is not NOT_RUN}
    survivors = tuple(name for name, status in ran.items() if status == SURVIVED)
    uncovered = tuple(name for name, status in ran.items() if status == UNCOVERED)
    killed = len(ran) - len(survivors) - len(uncovered)
    known = equivalents()
    equal = tuple(n for n in (*survivors, *uncovered) if listed(n, difference(n, root), known))
    survivors, uncovered = (
        tuple(n for n in some if n not in equal) for some in (survivors, uncovered)
    )
    refused = refusals((*survivors, *uncovered), root)
    survivors, uncovered = (
        tuple(n for n in some if n not in refused) for some in (survivors, uncovered)
    )
    return Outcome(killed, survivors, uncovered, equal, wasted, refused)


def refusals(names: Sequence[str], root: Path = ROOT) -> tuple[str, ...]:
    """Return the mutants that mypy refuses."""
    if not names:
        return ()
    with checker(root) as types:
        return tuple(
            name for name in names if types.refuses(*location(name), definition(name, root))
        )


def listed(name: str, difference: str, known: Collection[Change]) -> bool:
    """Return whether a mutant is among the `known` changes."""
    lines = [line for line in difference.splitlines() if not line.startswith(("---", "+++"))]
    before, after = (
        "\n".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )
    path, function = location(name)
    return any(
        (c.path, c.function, c.before, c.after) == (path, function, before, after) for c in known
    )


def difference(name: str, root: Path = ROOT) -> str:
    """Return the change that a mutant makes, as a unified diff."""
    command = [sys.executable, "-m", "mutmut", "show", name]
    shown = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    return shown.stdout


def _mutmut(names: Sequence[str], children: int) -> str:
    """Run mutmut, which prints its progress; return what it writes to stderr."""
    command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(children), *names]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False)
    return done.stderr
