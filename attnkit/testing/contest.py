"""Measure a variant beside PyTorch's functions, after a comparison of all results with float64."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnkit.errors import ArgumentError, AttnkitError
from attnkit.runtime.call import AttentionCall
from attnkit.runtime.prepare import prepare
from attnkit.testing import timing
from attnkit.testing.contenders import CONTENDERS, OURS, Attention, Problem, free_memory
from attnkit.testing.quantities import DenseCall, Quantities, dense, oracle
from attnkit.testing.rounding import perturbed
from attnkit.testing.timing import Times, in_turns
from attnkit.testing.tolerance import compare

_COPIES = 24  # float32 tensors of all scores that the float64 oracle may hold
_SAMPLES = 2  # of the rounding error, beside that of dense attention
_SHORTEST = 128  # length at which results are still compared

Progress = Callable[[str], None]


@dataclass
class Standing:
    """Holds what is known of one contender.

    Attributes:
        name: of the contender.
        error: largest error of a result over the allowed one; NaN if nothing was compared.
        worst: name of that result.
        first_call: seconds of the first call, with its compilation.
        forward, both: times of the forward, and of forward and backward.
        reason: why it cannot run, or with which plan attnkit runs; may be empty.
        no_backward: why it has no backward; may be empty.
        call: what was called first, at the full sizes; None before.
    """

    name: str
    error: float = math.nan
    worst: str = ""
    first_call: float = math.nan
    forward: Times | None = None
    both: Times | None = None
    reason: str = ""
    no_backward: str = ""
    call: Attention | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Contest:
    """Holds the result of `measure`.

    Attributes:
        problem: what was computed.
        standings: one for each contender, attnkit first.
        compared: at which sizes the results were compared, or why not.
    """

    problem: Problem
    standings: list[Standing] = field(default_factory=list)
    compared: str = ""

    @property
    def ok(self) -> bool:
        """Return whether attnkit ran, and was right where results were compared."""
        ours = self.standings[0]
        return ours.forward is not None and not ours.error > 1

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def measure(
    problem: Problem, *, rounds: int, seconds: float, progress: Progress = lambda text: None
) -> Contest:
    """Compare the results of all contenders with dense float64 attention, then time them in turns.

    Args:
        problem: what to compute.
        rounds: number of rounds.
        seconds: begin no further round after this time.
        progress: called with what is being done.

    Raises:
        AttnkitError: attnkit cannot compute the variant at these sizes.
    """
    if hasattr(problem.variant.mask, "kv_num_blocks"):
        raise ArgumentError(
            "the mask is PyTorch's BlockMask, whose block lists the others cannot take; name its "
            "mask_mod, or a BlockMask of attnkit.create_block_mask"
        )
    standings = [Standing(name) for name in CONTENDERS]
    standings[0].reason = _plan(problem)
    compared = _compare(problem, standings, progress)
    calls = dict(_started(problem, standings, progress))
    progress("timing")
    forward = {name: _forward(problem, call) for name, call in calls.items()}
    with torch.no_grad():
        times = in_turns(forward, problem.device, rounds=rounds, seconds=seconds)
    both: dict[str, Times] = {}
    if problem.backward:
        able = {s.name for s in standings if not s.no_backward}
        steps = {name: _step(problem, call) for name, call in calls.items() if name in able}
        both = in_turns(steps, problem.device, rounds=rounds, seconds=seconds)
    for standing in standings:
        standing.forward, standing.both = times.get(standing.name), both.get(standing.name)
    return Contest(problem, standings, compared)


def _plan(problem: Problem) -> str:
    """Return the plan with which attnkit runs the problem."""
    variant = problem.variant
    call = AttentionCall(
        *problem.inputs, variant.score_mod, variant.mask, enable_gqa=problem.grouped
    )
    plan = prepare(call, launchable=False).plan
    return f"{plan.template}: {plan.reason}"


def _compare(problem: Problem, standings: Sequence[Standing], progress: Progress) -> str:
    """Compare the contenders' results with the oracle; return at which sizes, or why not."""
    small = _comparable(problem)
    if isinstance(small, str):
        return small
    case = small.case
    progress("dense float64 attention")
    call = DenseCall(problem.variant.score_mod, small.kept, case, small.captured, problem.device)
    names = ["out", *(f"d{n}" for n in _differentiated(small))] if problem.backward else ["out"]
    gold = {name: t for name, t in oracle(call).items() if name in names}
    rough = [dense(call), *(perturbed(call, sample) for sample in range(_SAMPLES))]
    for standing in standings:
        progress(f"{standing.name}, compared with float64")
        results = _attempted(small, standing)
        if results is None:
            continue
        if small is not problem:
            standing.call = None
        expected = {name: t for name, t in gold.items() if name in results}
        rows = compare(results, expected, rough, case, standing.name)
        worst = max(rows, key=lambda row: row.ratio)
        standing.error, standing.worst = worst.ratio, worst.quantity
    return f"q_len {case.q_len}, kv_len {case.kv_len}, {problem.device}"


def _attempted(problem: Problem, standing: Standing) -> Quantities | None:
    """Return a contender's results; note in `standing` what it cannot compute. None for nothing."""
    start = time.perf_counter()
    try:
        call = CONTENDERS[standing.name](problem)
        results = _results(problem, call)
        _wait(problem)
        standing.call, standing.first_call = call, time.perf_counter() - start
        return results
    except Exception as error:  # whatever a peer raises is why it cannot run
        if standing.name == OURS:
            raise
        if not problem.backward:
            standing.reason = _why(error)
            return None
        standing.no_backward = _why(error)
    return _attempted(dataclasses.replace(problem, backward=False), standing)


def _comparable(problem: Problem) -> Problem | str:
    """Return the problem at lengths at which float64 fits in memory, or why there are none."""
    while _COPIES * problem.score_bytes > free_memory(problem.device) / 2:
        q_len, kv_len = problem.case.q_len // 2, problem.case.kv_len // 2
        if min(q_len, kv_len) < _SHORTEST:
            return "not compared: dense float64 attention does not fit in memory"
        case = dataclasses.replace(problem.case, q_len=q_len, kv_len=kv_len)
        problem = dataclasses.replace(problem, case=case)
        try:
            _plan(problem)
        except AttnkitError as error:
            return (
                "not compared: dense float64 attention does not fit in memory, and at shorter "
                f"lengths the variant is refused ({_why(error)})"
            )
    return problem


def _differentiated(problem: Problem) -> tuple[str, ...]:
    return ("query", "key", "value", *problem.captured.names)


def _results(problem: Problem, call: Attention) -> Quantities:
    """Run a contender once; return the output and, in a backward, the gradients by name."""
    if not problem.backward:
        return {"out": _forward(problem, call)()}
    out = call(*problem.inputs)
    targets = [*problem.inputs, *problem.captured.tensors]
    gradients = torch.autograd.grad(out, targets, problem.grad, allow_unused=True)
    named = zip(_differentiated(problem), targets, gradients, strict=True)
    results = {f"d{name}": torch.zeros_like(t) if g is None else g for name, t, g in named}
    return {"out": out.detach(), **results}


def _started(
    problem: Problem, standings: Sequence[Standing], progress: Progress
) -> Iterator[tuple[str, Attention]]:
    """Yield (name, call) of the contenders that run at the full sizes, after their first call."""
    for standing in standings:
        if standing.name != OURS and standing.reason:
            continue
        progress(f"{standing.name}, first call")
        if standing.call is None:  # nothing was compared, or at shorter lengths
            own = problem
            if standing.no_backward:
                own = dataclasses.replace(problem, backward=False)
            _attempted(own, standing)
        if standing.call is not None:
            _forward(problem, standing.call)()  # without autograd, which may compile once more
            yield standing.name, standing.call


def _wait(problem: Problem) -> None:
    """Synchronize with the device."""
    if problem.device.type == "cuda":
        torch.cuda.synchronize(problem.device)


def _forward(problem: Problem, call: Attention) -> Callable[[], Tensor]:
    """Return the forward alone, without autograd."""
    q, k, v = (t.detach() for t in problem.inputs)

    def forward() -> Tensor:
        with torch.no_grad():
            return call(q, k, v)

    return forward


def _step(problem: Problem, call: Attention) -> Callable[[], object]:
    """Return forward and backward."""
    inputs = problem.inputs
    targets = [*inputs, *problem.captured.tensors]
    return lambda: torch.autograd.grad(call(*inputs), targets, problem.grad, allow_unused=True)


def _why(error: Exception) -> str:
    """Return the first line of an error that says something, with its class if it is not ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else "no message"
    return text if isinstance(error, AttnkitError) else f"{type(error).__name__}: {text}"


def _lines(contest: Contest) -> Iterator[str]:
    """Yield the lines of the report."""
    p = contest.problem
    shapes = ", ".join(
        f"{name} {list(shape)}"
        for name, shape in zip(("query", "key", "value"), p.case.shapes, strict=True)
    )
    yield str(p.variant)
    yield f"{shapes}, {str(p.case.dtype).removeprefix('torch.')}, {p.device}"
    yield ""
    columns = ["forward", *(["forward and backward"] if p.backward else [])]
    yield "  ".join(["".ljust(24), *(c.ljust(26) for c in columns), "error", "first call"])
    for s in contest.standings:
        if s.forward is None:
            yield f"{s.name.ljust(24)}  cannot run: {s.reason}"
            continue
        times = [str(s.forward), *([str(s.both or "cannot run")] if p.backward else [])]
        error = "-" if math.isnan(s.error) else f"{s.error:.2f}"
        cells = [*(t.ljust(26) for t in times), error.ljust(5), f"{s.first_call:.2f} s"]
        yield "  ".join([s.name.ljust(24), *cells]).rstrip()
    yield ""
    yield f"attnkit's plan: {contest.standings[0].reason}"
    for s in contest.standings:
        if s.no_backward and s.forward is not None:
            yield f"{s.name} has no backward here: {s.no_backward}"
        if s.error > 1:
            yield (
                f"{s.name} is WRONG or too far: {s.worst} has {s.error:.3g} times the error that "
                "`attnkit check` allows"
            )
    rounds = {len(t.rounds) for s in contest.standings for t in (s.forward, s.both) if t}
    yield f"method: {timing.method(p.device)}; {min(rounds)} rounds or more after a first call"
    if contest.compared.startswith("not compared"):
        yield f"error: {contest.compared}"
    else:
        yield (
            f"error: largest error of output{' and gradients' if p.backward else ''} against dense "
            f"float64 attention over the allowed one, at {contest.compared}"
        )
