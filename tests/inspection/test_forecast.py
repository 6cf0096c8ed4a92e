"""Check predicted schedules: their numbers, their report in `explain`, and their pictures."""

from __future__ import annotations

import heapq
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnkit import Explanation, create_block_mask, explain, masks
from attnkit.cli import main
from attnkit.errors import OptionError, ShapeError, UnsupportedError
from attnkit.inspection.forecast import Direction, Forecast, cycles, forecast
from attnkit.inspection.timeline import bars, colours, save_timeline
from attnkit.schedule.scheduler import BACKWARD, FORWARD
from attnkit.sparsity.block_runs import BlockRuns


def causal(length: int, **sizes: int) -> Forecast:
    runs = create_block_mask(masks.causal(), None, None, length, length).runs
    found = forecast(runs, **{"batch": 1, "heads": 1, "head_dim": 128} | sizes)
    assert found is not None
    return found


@settings(max_examples=25)
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 12), st.integers(1, 12),
    st.integers(1, 9), st.integers(0, 999),
)  # fmt: skip
def test_numbers_are_those_of_the_rows(
    batch: int, heads: int, rows: int, columns: int, sms: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    states = torch.randint(0, 3, (1, heads, rows, columns), generator=random, dtype=torch.int8)
    runs = BlockRuns.from_states(states, rows * 128, columns * 128, (128, 128))
    found = forecast(runs, batch=batch, heads=heads, head_dim=128, sms=sms)
    assert found is not None
    for direction, cost, axis in ((found.forward, FORWARD, 3), (found.backward, BACKWARD, 2)):
        full, partial = ((states == kind).sum(axis) for kind in (2, 1))
        work = (full * cost.full + partial * cost.partial + cost.tile).flatten().tolist() * batch
        free = [0] * sms  # grid order, by hand
        for row in work:
            heapq.heapreplace(free, free[0] + row)
        assert direction.grid_timeline.makespan == max(free)
        assert direction.bound >= sum(work) / sms
        assert direction.bound <= direction.timeline.makespan <= sum(work) * 2
        if not direction.schedule.split.numel():
            assert direction.bound == max(sum(work) / sms, max(work))


def test_report() -> None:
    found = causal(2048, heads=4, sms=8)
    number = r"[\d.]+[kMG]?"
    for name, direction in (("forward", found.forward), ("backward", found.backward)):
        (line,) = [line for line in str(found).splitlines() if line.startswith(name)]
        shape = (
            rf"{name} +64 work tiles: ({number}) cycles, ([\d.]+) x the bound of ({number}), "
            rf"idle ([\d.]+)%; grid order ({number}), ([\d.]+) x as long"
        )
        match = re.fullmatch(shape, line)
        assert match is not None, line
        makespan, slow = direction.timeline.makespan, direction.grid_timeline.makespan
        assert match[1] == cycles(makespan)
        assert float(match[2]) == pytest.approx(makespan / direction.bound, abs=1e-3)
        assert match[3] == cycles(direction.bound)
        assert float(match[4]) == pytest.approx(100 * direction.timeline.idle, abs=0.1)
        assert match[5] == cycles(slow)
        assert float(match[6]) == pytest.approx(slow / makespan, abs=0.01)
    assert "note" not in str(found)
    assert "note      the cycles are those of 128 x 128 tiles" in str(causal(512, head_dim=64))


def test_split_rows_are_counted() -> None:
    found = causal(8192, sms=132).forward
    assert 0 < found.schedule.split.shape[0] < found.schedule.work_tile_count
    parts = int((found.schedule.slot >= 0).sum())
    assert f"{found.schedule.split.shape[0]} rows split into {parts} parts" in str(found)


def test_explain_shows_it() -> None:
    found = explain(None, masks.causal(), q_len=1024, heads=4, head_dim=128, sms=16)
    assert "schedule (predicted for 16 SMs, not measured)\n  forward   32 work tiles" in str(found)
    assert found.forecast is not None
    times, clearing = found.schedule.rsplit("\n", 1)
    assert times == str(found.forecast)
    assert clearing.startswith("dQ        on Hopper, zeros are written before: ")
    sparse = lambda b, h, q, kv: (3 * (q // 128) + kv // 128) % 16 == 0
    counted = explain(None, sparse, q_len=4096, heads=4, head_dim=128).schedule
    assert "dQ        on Hopper, the kernel counts the kv tiles at each q tile" in counted
    nothing = explain(q_len=300, kv_len=200)  # no mask: all tiles
    assert "schedule (predicted for 132 SMs, not measured)" in str(nothing)
    assert "forward   3 work tiles" in nothing.schedule
    with pytest.raises(OptionError, match="sms must be a positive int, got 0"):
        explain(q_len=64, sms=0)


def test_too_much_is_not_simulated() -> None:
    runs = create_block_mask(masks.causal(), None, None, 256, 256).runs
    assert forecast(runs, batch=1 << 10, heads=1 << 10, head_dim=64) is None
    large = Explanation(None, None, runs, explain(q_len=8).plan, (1 << 10, 1 << 10, 256, 256))
    assert large.schedule == "not simulated: more than a million rows of tiles"


def test_runs_for_other_heads_are_refused() -> None:
    runs = create_block_mask(lambda b, h, q, kv: kv <= q + h, None, 2, 256, 256).runs
    with pytest.raises(ShapeError, match="2 heads"):
        forecast(runs, batch=1, heads=4, head_dim=64)


@pytest.mark.parametrize(
    ("count", "shown"), [(7, "7"), (1234, "1.23k"), (1_180_000, "1.18M"), (5.5e9, "5.5G")]
)
def test_cycles_to_read(count: float, shown: str) -> None:
    assert cycles(count) == shown


# --- pictures


@pytest.mark.parametrize("sms", [8, 132])
def test_bars_of_an_sm_do_not_overlap(sms: int) -> None:
    direction: Direction = causal(8192, heads=2, sms=sms).forward
    corners = bars(direction.timeline)
    (left, top), (right, bottom) = corners[:, 0].unbind(-1), corners[:, 2].unbind(-1)
    assert bool((right > left).all())
    worker = direction.timeline.worker
    assert torch.equal(top.floor().int(), worker)
    assert torch.equal(bottom.ceil().int(), worker + 1)
    assert bool((right <= direction.timeline.end).all())
    for sm in range(sms):
        own = (worker == sm).nonzero().flatten()
        own = own[left[own].argsort()]
        assert bool((right[own][:-1] <= left[own][1:]).all())


def test_parts_of_split_rows_have_their_colour() -> None:
    schedule = causal(8192, sms=132).forward.schedule
    found = colours(schedule)
    split = {found[i] for i in (schedule.slot >= 0).nonzero().flatten().tolist()}
    whole = {found[i] for i in (schedule.slot < 0).nonzero().flatten().tolist()}
    assert len(split) == 1
    assert not split & whole


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_same_schedule_same_file(tmp_path: Path, suffix: str) -> None:
    found = causal(2048, heads=2, sms=8)
    files = [save_timeline(tmp_path / f"{i}.{suffix}", found, title="causal") for i in range(2)]
    other = save_timeline(tmp_path / f"b.{suffix}", found, backward=True, title="causal")
    assert files[0].read_bytes() == files[1].read_bytes() != other.read_bytes()
    if suffix == "svg":
        assert "predicted for 8 SMs, not measured" in files[0].read_text()


def test_bad_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = causal(256)
    with pytest.raises(OptionError, match=r"path must end in \.png or \.svg"):
        save_timeline(tmp_path / "a.pdf", found)
    missing: Any = None
    monkeypatch.setitem(sys.modules, "matplotlib", missing)
    with pytest.raises(UnsupportedError, match="needs matplotlib"):
        save_timeline(tmp_path / "a.png", found)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.svg"
    arguments = f"masks:causal --q-len 512 --sms 4 --head-dim 128 --timeline {path} --backward"
    assert main(["explain", *arguments.split()]) == 0
    out, _ = capsys.readouterr()
    assert "schedule (predicted for 4 SMs, not measured)" in out
    assert out.endswith(f"wrote {path}\n")
    assert "masks:causal, backward" in path.read_text()
    assert main(["explain", "masks:causal", "--q-len", "64", "--sms", "0"]) == 2
