"""Misuse every public name: each call must succeed or raise an error of attnkit.

    PYTHONPATH=. python tests/fuzz/misuse.py 10000             # make misuse N=10000
    PYTHONPATH=. python tests/fuzz/misuse.py --only explain 500
    PYTHONPATH=. python tests/fuzz/misuse.py --replay 4711     # one call, with its traceback

A subject is a function together with valid arguments. A misused call replaces one or two arguments
by values from `garbage`. Call number n draws from its own seed, so it can be repeated alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from attnkit.errors import AttnkitError
from tests.fuzz import garbage
from tests.fuzz.subjects import SUBJECTS, Subject

SECONDS = 30  # a call that takes longer hangs
MEMORY = 24 << 30  # of addresses; torch alone maps 8 GiB
OUTCOMES = ("accepted", "refused", "foreign", "hangs")


class HangError(BaseException):
    """Raised inside a call that exceeds the time limit."""


@dataclass(frozen=True)
class Outcome:
    """Hold the outcome of one misused call.

    Attributes:
        number: seed of the call.
        subject: name of the function.
        changes: the arguments that were replaced, as text.
        kind: one of `OUTCOMES`.
        error: the error that was raised, or None.
    """

    number: int
    subject: str
    changes: str
    kind: str
    error: BaseException | None = None

    def __str__(self) -> str:
        lines = str(self.error).strip().splitlines() or [""]
        what = f"{type(self.error).__name__}: {lines[0][:160]} ({_place(self.error)})"
        return f"{self.kind} {self.number}: {self.subject}({self.changes})\n    {what}"


def misuse(number: int, subjects: dict[str, Subject] = SUBJECTS) -> Outcome:
    """Make one misused call and return its outcome.

    Args:
        number: seed of the draw.
        subjects: functions to choose from, by name.
    """
    random = Random(number)
    name = random.choice(list(subjects))
    subject = subjects[name]
    arguments = dict(subject.arguments())
    shown = []
    count = 1 if random.random() < 0.75 else 2
    names = random.sample(list(arguments), min(count, len(arguments)))
    builders = {}
    for argument in names:
        value, builders[argument] = garbage.draw(random, subject.kinds.get(argument, ("object",)))
        shown.append(f"{argument}: {value}")
    changes = ", ".join(shown)
    torch.manual_seed(number)
    try:
        with _limited(SECONDS), warnings.catch_warnings(), _silent():
            warnings.simplefilter("ignore")
            subject.call(arguments | {n: build() for n, build in builders.items()})
    except HangError as error:
        return Outcome(number, name, changes, "hangs", error)
    except AttnkitError as error:
        return Outcome(number, name, changes, "refused", error)
    except Exception as error:
        kind = "accepted" if _is_users(error) else "foreign"
        return Outcome(number, name, changes, kind, error)
    return Outcome(number, name, changes, "accepted")


def _is_users(error: BaseException) -> bool:
    """Return whether a function in `garbage` raised the error, as a user's function would."""
    return traceback.extract_tb(error.__traceback__)[-1].filename == garbage.__file__


def _place(error: BaseException | None) -> str:
    """Return the last line in the traceback that is in this repository, as "folder/file:line"."""
    if error is None:
        return ""
    own = [
        f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename
    ]
    last = own[-1]
    return f"{'/'.join(last.filename.split('/')[-2:])}:{last.lineno}"


@contextlib.contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raise `HangError` inside the `with` block after `seconds`."""

    def expire(*_: Any) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def report(outcomes: list[Outcome]) -> str:
    """Format one example of each kind of failure, and the number of calls per outcome."""
    counts = Counter(o.kind for o in outcomes)
    failures: dict[tuple[str, str], list[Outcome]] = {}
    for o in outcomes:
        if o.kind in ("foreign", "hangs"):
            failures.setdefault((type(o.error).__name__, _place(o.error)), []).append(o)
    shown = [f"{len(same)} x {same[0]}" for same in failures.values()]
    return "\n".join([*shown, ", ".join(f"{counts[kind]} {kind}" for kind in OUTCOMES)])


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Make misused calls; return 1 if one hung or raised an error that is not attnkit's."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("count", type=int, nargs="?", default=10_000, help="number of calls")
    parser.add_argument("--first", type=int, default=0, help="seed of the first call")
    parser.add_argument("--only", default="", help="subjects whose name contains this")
    parser.add_argument("--replay", type=int, help="repeat one call and show its traceback")
    parser.add_argument("--verbose", action="store_true", help="show every call")
    options = parser.parse_args(argv)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    subjects = {n: s for n, s in SUBJECTS.items() if options.only in n}
    if options.replay is not None:
        outcome = misuse(options.replay, subjects)
        _say(f"{outcome.kind}: {outcome.subject}({outcome.changes})")
        if outcome.error is not None:
            traceback.print_exception(outcome.error)
        return 0
    call: Callable[[int], Outcome] = lambda n: misuse(n, subjects)
    outcomes = []
    for number in range(options.first, options.first + options.count):
        began = time.perf_counter()
        outcomes.append(call(number))
        if options.verbose:
            o = outcomes[-1]
            _say(f"{time.perf_counter() - began:5.1f} {o.kind} {number} {o.subject}({o.changes})")
    _say(report(outcomes))
    return int(any(o.kind in ("foreign", "hangs") for o in outcomes))


if __name__ == "__main__":
    sys.exit(main())
