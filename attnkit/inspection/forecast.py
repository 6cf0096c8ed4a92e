"""What the schedule of a mask is predicted to take on a GPU, against the bound and grid order.

Nothing is measured: pieces take what the cost model of `attnkit.schedule.scheduler` says, in SM cycles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attnkit.schedule.scheduler import (
    BACKWARD,
    FORWARD,
    Schedule,
    Shape,
    schedule_backward,
    schedule_forward,
)
from attnkit.schedule.simulator import Timeline, simulate
from attnkit.schedule.split_kv import Cost
from attnkit.sparsity.block_runs import BlockRuns

HOPPER_SMS = 132  # of an H100 SXM or an H200
MODEL_BLOCK, MODEL_HEAD_DIM = (128, 128), 128  # what the costs were measured at
_MOST_ROWS = 1 << 20


@dataclass(frozen=True)
class Card:
    """A GPU, as its data sheet has it.

    Attributes:
        name: the GPU.
        arch: what its kernels are compiled for.
        sms: streaming multiprocessors.
        peak: dense 16-bit TFLOP/s of its tensor cores.
    """

    name: str
    arch: str
    sms: int
    peak: float

    @property
    def clock(self) -> float:
        """Clocks a second, in 10**9, at which the peak holds; under load it may be less."""
        from attnkit.jit.emulator_runs import rates_of

        return self.peak * 1e3 / (self.sms * rates_of(self.arch).tensor)


# H200 SXM and B200 data sheets, without sparsity
CARDS = {
    card.arch: card
    for card in (
        Card("H200", "sm_90a", HOPPER_SMS, 989.0),
        Card("B200", "sm_100a", 148, 2250.0),
    )
}


@dataclass(frozen=True, eq=False)
class Direction:
    """One pass, simulated twice.

    Attributes:
        schedule, timeline: longest first, split where that pays.
        grid, grid_timeline: the same rows in the order of a plain launch.
    """

    schedule: Schedule
    timeline: Timeline
    grid: Schedule
    grid_timeline: Timeline

    @property
    def bound(self) -> float:
        """No schedule of these pieces ends sooner, in cycles."""
        return self.schedule.bound

    def __str__(self) -> str:
        schedule, makespan = self.schedule, self.timeline.makespan
        rows, splits = schedule.pieces, schedule.split.shape[0]
        pieces = int(schedule.split_ptr[-1]) if splits else 0
        cut = f", {splits} rows in {pieces} pieces" if splits else ""
        return (
            f"{rows} piece{'s' * (rows != 1)}{cut}: {cycles(makespan)} cycles, "
            f"{makespan / self.bound:.3f} x the bound of {cycles(self.bound)}, "
            f"idle {self.timeline.idle:.1%}; grid order {cycles(self.grid_timeline.makespan)}, "
            f"{self.grid_timeline.makespan / makespan:.2f} x as long"
        )


@dataclass(frozen=True, eq=False)
class Forecast:
    """Forward and backward of one mask on a number of SMs.

    Attributes:
        sms: streaming multiprocessors, one persistent CTA each.
        block, head_dim: what is scheduled; the cost model holds for 128 x 128 and 128.
        forward, backward: the passes.
    """

    sms: int
    block: tuple[int, int]
    head_dim: int
    forward: Direction
    backward: Direction

    def __str__(self) -> str:
        lines = [f"forward   {self.forward}", f"backward  {self.backward}"]
        if (self.block, self.head_dim) != (MODEL_BLOCK, MODEL_HEAD_DIM):
            lines.append(
                "note      the cycles are those of 128 x 128 tiles with head dim 128: here the "
                "ratios count"
            )
        return "\n".join(lines)


def forecast(
    runs: BlockRuns, *, batch: int, heads: int, head_dim: int, sms: int = HOPPER_SMS
) -> Forecast | None:
    """Schedule and simulate; None where there are more rows than are worth it (a million).

    Args:
        runs: the mask's tiles, for this batch and these heads or for 1.
        batch, heads: of the query; key and value have as many.
        head_dim: width of query, key and value, in 16 bits.
        sms: how many pieces run at a time.

    Raises:
        OptionError: sms is not positive.
        ShapeError: the runs do not fit the batch or the heads.
    """
    if batch * heads * max(runs.q_blocks, runs.kv_blocks) > _MOST_ROWS:
        return None
    return Forecast(
        sms,
        runs.block,
        head_dim,
        forecast_forward(runs, batch=batch, heads=heads, head_dim=head_dim, sms=sms),
        forecast_backward(runs, batch=batch, heads=heads, head_dim=head_dim, sms=sms),
    )


def forecast_forward(
    runs: BlockRuns, *, batch: int, heads: int, head_dim: int, sms: int, cost: Cost = FORWARD
) -> Direction:
    """The forward alone, with costs of one's own; arguments and errors as of `forecast`."""
    # 16 bits: K and V of a kv tile
    shape = Shape(batch, heads, runs.block[1] * head_dim * 4)
    return _direction(schedule_forward, runs, shape, sms, cost)


def forecast_backward(
    runs: BlockRuns, *, batch: int, heads: int, head_dim: int, sms: int, cost: Cost = BACKWARD
) -> Direction:
    """The backward alone, with costs of one's own; arguments and errors as of `forecast`."""
    # 16 bits: Q, dO and a float32 dQ of a q tile
    shape = Shape(batch, heads, runs.block[0] * head_dim * 8)
    return _direction(schedule_backward, runs, shape, sms, cost)


def _direction(
    make: Callable[..., Schedule], runs: BlockRuns, shape: Shape, sms: int, cost: Cost
) -> Direction:
    best = make(runs, shape, workers=sms, cost=cost)
    grid = make(runs, shape, workers=sms, cost=cost, order="grid", split=False)
    return Direction(best, simulate(best), grid, simulate(grid))


def cycles(count: float) -> str:
    """A number of cycles, to be read."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
