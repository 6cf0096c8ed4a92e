"""Search for wrong results: random variants and calls against an oracle that shares no code.

    python benchmarks/fuzz.py --minutes 10 --seed 3

Variants are random expressions over positions, captured tables and learned tensors, and
compositions of library masks and mods. Calls differ in lengths, batch, grouped heads, head dims,
dtype, strides and scale. Most calls run on the CPU template, forward and backward; a share of the
time goes to the emulated GPU kernels. `attnkit.testing.check_case` compares each result with dense
attention in float64.

On a failure the script prints the seed of the round and a small program that reproduces the
failure, and exits with status 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import hypothesis
import torch
from hypothesis import HealthCheck, Phase, Verbosity, settings
from hypothesis import strategies as st

from attnkit.errors import BoundsError, DTypeError
from attnkit.runtime.variant import Variant
from attnkit.testing import Case, CheckError, Limits, Report, cases, check_case, variants


@dataclass(frozen=True)
class Target:
    """Describe what one round checks.

    Attributes:
        backend: the backend under test.
        limits: limits of the sizes to draw.
        calls: hypothesis strategy that draws the calls.
        examples: number of calls to draw in a round; hypothesis takes the smallest call first.
        shrink_seconds: time to search for a smaller call after a failure.
    """

    backend: str
    limits: Limits
    calls: st.SearchStrategy[Case]
    examples: int
    shrink_seconds: float


def _cpu() -> Target:
    limits = Limits()
    return Target("cpu", limits, cases(limits, normalization=None), 20, 30.0)


def _emulated(architecture: str) -> Target:
    """Return a target for the emulated GPU kernels: small 16-bit calls, aligned head dims."""
    limits = Limits(q_len=(1, 80), kv_len=(1, 80), batch=(1, 1), heads=(1, 2))
    dim = st.sampled_from([16, 64])

    def calls(weights: str) -> st.SearchStrategy[Case]:
        softmax = weights not in ("sigmoid", "none")  # no kernel drops other weights
        return st.builds(
            Case,
            q_len=st.integers(*limits.q_len),
            kv_len=st.integers(*limits.kv_len),
            heads=st.integers(*limits.heads),
            head_dim=st.shared(dim, key="dim"),
            value_dim=st.shared(dim, key="dim"),
            dtype=st.sampled_from([torch.bfloat16, torch.float16]),
            spread=st.sampled_from([1.0, 0.1, 3.0]),
            seed=st.integers(0, 999),
            sink=st.just(weights == "sink"),
            normalization=st.just("softmax" if weights == "sink" else weights),
            dropout_p=st.sampled_from([0.0, 0.0, 0.3]) if softmax else st.just(0.0),
            statistics=st.sampled_from([False, False, True]),
        )

    weights = st.sampled_from(["softmax"] * 3 + ["sink", "softmax1", "sigmoid", "none"])
    return Target(f"emulate:{architecture}", limits, weights.flatmap(calls), 4, 300.0)


TARGETS = {"cpu": _cpu(), "sm_90a": _emulated("sm_90a"), "sm_100a": _emulated("sm_100a")}


@dataclass
class Round:
    """Count the calls that a round compared, and hold its smallest failure."""

    calls: int = 0
    failure: Report | None = None
    deadline: float = field(default=float("inf"), repr=False)


class _Failure(Exception):
    """Raised to tell hypothesis that a call failed, so that it searches for a smaller one."""


class _Stop(BaseException):
    """Raised to end the search for a smaller call.

    Not a subclass of Exception, because hypothesis would treat that as another failure.
    """


def run_round(target: Target, seed: int) -> Round:
    """Draw variants and calls from `seed`, check each, and shrink the first failure."""
    result = Round()

    @hypothesis.seed(seed)
    @settings(
        max_examples=target.examples,
        deadline=None,
        database=None,
        derandomize=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
        verbosity=Verbosity.quiet,
    )
    @hypothesis.given(variants(target.limits), target.calls)
    def body(variant: Variant, case: Case) -> None:
        if time.monotonic() > result.deadline:
            raise _Stop
        try:
            report = check_case(variant, case, backends=[target.backend])
        except (BoundsError, DTypeError):
            # refused before it runs: an index, or a float64 tensor that a function compares and
            # float32 would round
            hypothesis.reject()
        except CheckError as error:
            # after a failure hypothesis tries smaller calls, so the last one is the smallest
            result.failure = error.report
            result.deadline = min(result.deadline, time.monotonic() + target.shrink_seconds)
            raise _Failure from None
        # a backend may refuse a call, which is a note
        result.calls += any(row.backend == target.backend for row in report.rows)

    try:
        body()
    except (_Failure, _Stop):
        pass
    return result


class Search:
    """Run rounds, each with its own seed, until time is up or a round fails.

    Args:
        seed: seed of the first round; each later round adds 1.
        minutes: time after which no round begins. At least one round runs for each target.
        share: share of the time that goes to the emulated GPU kernels.
    """

    def __init__(self, seed: int, minutes: float, share: float) -> None:
        self.seed = seed
        self.seconds = 60 * minutes
        self.share = share
        self.calls = dict.fromkeys(TARGETS, 0)
        self.spent = dict.fromkeys(TARGETS, 0.0)

    def run(self) -> int:
        """Run the search and print its outcome; return the exit status."""
        began = time.monotonic()
        while time.monotonic() - began < self.seconds:
            name = self._next()
            start = time.monotonic()
            result = run_round(TARGETS[name], self.seed)
            self.spent[name] += time.monotonic() - start
            self.calls[name] += result.calls
            if result.failure is not None:
                print(failure_text(result.failure, name, self.seed))
                return 1
            self.seed += 1
        counts = ", ".join(f"{count} on {name}" for name, count in self.calls.items())
        print(
            f"no wrong result in {sum(self.calls.values())} calls ({counts}); "
            f"the next seed is {self.seed}"
        )
        return 0

    def _next(self) -> str:
        """Return the name of the target that has used the least of its share of the time."""
        shares = {name: self.share / 2 for name in TARGETS} | {"cpu": 1 - self.share}
        eligible = [name for name, share in shares.items() if share > 0]
        return min(eligible, key=lambda name: self.spent[name] / shares[name])


def failure_text(report: Report, target: str, seed: int) -> str:
    """Format a failure together with the command that repeats its round."""
    again = f"python benchmarks/fuzz.py --seed {seed} --only {target}"
    return f"{report}\n\nseed {seed}; this repeats the round: {again}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the options, run the search, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="minutes to search (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round (default 0)")
    parser.add_argument(
        "--emulated",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="share of the time for the emulated GPU kernels, from 0 to 1 (default 0.25)",
    )
    parser.add_argument("--only", choices=TARGETS, help="run one round, on this target")
    options = parser.parse_args(arguments)
    if not 0 <= options.emulated <= 1:
        parser.error(f"--emulated must be from 0 to 1, got {options.emulated}")
    torch.set_num_threads(1)  # enough for small tensors, and fixes the order of every sum
    if options.only is not None:
        result = run_round(TARGETS[options.only], options.seed)
        if result.failure is None:
            print(f"no wrong result in {result.calls} calls")
            return 0
        print(failure_text(result.failure, options.only, options.seed))
        return 1
    return Search(options.seed, options.minutes, options.emulated).run()


if __name__ == "__main__":
    sys.exit(main())
