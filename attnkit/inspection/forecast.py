"""Predict the time of a mask's schedule on a GPU, and compare it with a bound and with grid order.

Nothing is measured. The cost model of `attnkit.schedule.scheduler` gives the cycles of a work tile.
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

HOPPER_SMS = 132  # SMs of an H100 SXM or an H200
MODEL_BLOCK, MODEL_HEAD_DIM = (128, 128), 128  # sizes for which the costs were measured
_MOST_ROWS = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """Describes a GPU by the numbers of its data sheet.

    Attributes:
        name: NVIDIA's name of the GPU.
        arch: architecture of its kernels.
        sms: streaming multiprocessors.
        peak: dense 16-bit TFLOP/s of its tensor cores.
    """

    name: str
    arch: str
    sms: int
    peak: float

    @property
    def clock(self) -> float:
        """Return the clock in GHz at which the tensor cores reach `peak`.

        Under load the clock may be lower.
        """
        from attnkit.jit.emulator_runs import rates_of

        return self.peak * 1e3 / (self.sms * rates_of(self.arch).tensor)


# H200 SXM and B200 data sheets, without sparsity
GPUS = {
    gpu.arch: gpu
    for gpu in (
        Gpu("H200", "sm_90a", HOPPER_SMS, 989.0),
        Gpu("B200", "sm_100a", 148, 2250.0),
    )
}


@dataclass(frozen=True, eq=False)
class Direction:
    """Holds two simulated schedules of a forward or of a backward: the best one and grid order.

    Attributes:
        schedule, timeline: longest work tiles first, long rows split along KV where that pays.
        grid, grid_timeline: whole rows in the order of a plain launch.
    """

    schedule: Schedule
    timeline: Timeline
    grid: Schedule
    grid_timeline: Timeline

    @property
    def bound(self) -> float:
        """Return a lower bound of the cycles of any schedule of these work tiles."""
        return self.schedule.bound

    def __str__(self) -> str:
        schedule, makespan = self.schedule, self.timeline.makespan
        rows, splits = schedule.work_tile_count, schedule.split.shape[0]
        parts = int(schedule.split_ptr[-1]) if splits else 0
        split = f", {splits} rows split into {parts} parts" if splits else ""
        return (
            f"{rows} work tile{'s' * (rows != 1)}{split}: {cycles(makespan)} cycles, "
            f"{makespan / self.bound:.3f} x the bound of {cycles(self.bound)}, "
            f"idle {self.timeline.idle:.1%}; grid order {cycles(self.grid_timeline.makespan)}, "
            f"{self.grid_timeline.makespan / makespan:.2f} x as long"
        )


@dataclass(frozen=True, eq=False)
class Forecast:
    """Holds the predicted forward and backward schedules of a mask on `sms` SMs.

    Attributes:
        sms: number of streaming multiprocessors, one persistent CTA each.
        block, head_dim: tile sizes and head dim; the cost model holds for 128 x 128 and 128.
        forward, backward: the simulated schedules.
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
    """Schedule the forward and the backward of a mask, and simulate them.

    Args:
        runs: the mask's tiles, for this batch and these heads or for 1.
        batch, heads: of query, key and value.
        head_dim: of query, key and value, whose elements have 16 bits.
        sms: number of SMs; each runs one work tile at a time.

    Returns:
        The forecast; None if there are more than a million rows of tiles.

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
    """Schedule and simulate the forward with a cost model; see `forecast` for other arguments."""
    # bytes of K and V of a kv tile, 16 bits each
    shape = Shape(batch, heads, runs.block[1] * head_dim * 4)
    return _direction(schedule_forward, runs, shape, sms, cost)


def forecast_backward(
    runs: BlockRuns, *, batch: int, heads: int, head_dim: int, sms: int, cost: Cost = BACKWARD
) -> Direction:
    """Schedule and simulate the backward with a cost model; see `forecast` for other arguments."""
    # bytes of Q and dO of a q tile, 16 bits each, and of its float32 dQ
    shape = Shape(batch, heads, runs.block[0] * head_dim * 8)
    return _direction(schedule_backward, runs, shape, sms, cost)


def _direction(
    make: Callable[..., Schedule], runs: BlockRuns, shape: Shape, sms: int, cost: Cost
) -> Direction:
    """Build and simulate the best schedule and the schedule in grid order."""
    best = make(runs, shape, workers=sms, cost=cost)
    grid = make(runs, shape, workers=sms, cost=cost, order="grid", split=False)
    return Direction(best, simulate(best), grid, simulate(grid))


def cycles(count: float) -> str:
    """Format a number of cycles with three digits and a unit.

    >>> cycles(1_180_000)
    '1.18M'
    """
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
