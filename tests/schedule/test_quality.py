"""Check how good schedules are: work tiles, rows that are split, makespan, and reuse of L2.

Other numbers are no errors, but work tiles that end later or read more are slower on a GPU: a change
of the scheduler shows here what it costs.
"""

from __future__ import annotations

import pytest

from attnkit import create_block_mask, masks
from attnkit.schedule.scheduler import Shape, schedule_backward, schedule_forward
from attnkit.schedule.simulator import report
from attnkit.schedule.split_kv import Cost

COST = Cost(full=3030, partial=3180, tile=9500, merge=6500)
ORDERS = ("longest", "grid", "ascending", "descending", "falling")
# (mask, workers, direction) -> for each order (work tiles, rows split, makespan, reuse in per mille)
MEASURED = {
    ("causal", 7, "forward"): [
        (128, 0, 1101440, 857), (128, 0, 1132860, 187), (128, 0, 1134770, 182),
        (128, 0, 1101440, 857), (128, 0, 1101440, 857),
    ],
    ("causal", 7, "backward"): [
        (128, 0, 1095940, 839), (128, 0, 1095940, 839), (128, 0, 1095940, 839),
        (128, 0, 1132860, 26), (128, 0, 1095380, 62),
    ],
    ("causal", 50, "forward"): [
        (81, 17, 103580, 939), (64, 0, 137470, 939), (78, 14, 116700, 939),
        (81, 17, 103580, 939), (64, 0, 106610, 939),
    ],
    ("causal", 50, "backward"): [
        (81, 17, 103580, 939), (64, 0, 106610, 939), (81, 17, 103580, 939),
        (78, 14, 116700, 939), (64, 0, 106610, 939),
    ],
    ("sliding_window", 7, "forward"): [
        (128, 0, 451610, 880), (128, 0, 454790, 783), (128, 0, 451760, 893),
        (128, 0, 451760, 855), (128, 0, 451760, 855),
    ],
    ("sliding_window", 7, "backward"): [
        (128, 0, 445700, 672), (128, 0, 445700, 672), (128, 0, 445700, 672),
        (128, 0, 454790, 587), (128, 0, 448730, 543),
    ],
    ("sliding_window", 50, "forward"): [
        (64, 0, 50200, 787), (64, 0, 50200, 787), (64, 0, 50200, 787),
        (64, 0, 50200, 787), (64, 0, 50200, 787),
    ],
    ("sliding_window", 50, "backward"): [
        (64, 0, 50200, 787), (64, 0, 50200, 787), (64, 0, 50200, 787),
        (64, 0, 50200, 787), (64, 0, 50200, 787),
    ],
    ("longformer", 7, "forward"): [
        (128, 0, 760720, 754), (128, 0, 760570, 639), (128, 0, 757390, 815),
        (128, 0, 809210, 721), (128, 0, 754360, 731),
    ],
    ("longformer", 7, "backward"): [
        (128, 0, 758970, 582), (128, 0, 760570, 638), (128, 0, 757390, 447),
        (128, 0, 809210, 174), (128, 0, 777600, 402),
    ],
    ("longformer", 50, "forward"): [
        (66, 2, 77920, 901), (64, 0, 110810, 901), (66, 2, 77920, 901),
        (120, 52, 104490, 901), (64, 0, 110810, 901),
    ],
    ("longformer", 50, "backward"): [
        (66, 2, 77920, 901), (64, 0, 110810, 901), (66, 2, 77920, 901),
        (120, 52, 104490, 901), (64, 0, 110810, 901),
    ],
    ("document/causal", 7, "forward"): [
        (128, 0, 298160, 738), (128, 0, 294980, 492), (128, 0, 298160, 746),
        (128, 0, 294980, 746), (128, 0, 294980, 746),
    ],
    ("document/causal", 7, "backward"): [
        (128, 0, 298160, 472), (128, 0, 294980, 492), (128, 0, 294980, 492),
        (128, 0, 298160, 429), (128, 0, 294980, 413),
    ],
    ("document/causal", 50, "forward"): [
        (64, 0, 31720, 492), (64, 0, 31720, 492), (64, 0, 31720, 492),
        (64, 0, 31720, 492), (64, 0, 31720, 492),
    ],
    ("document/causal", 50, "backward"): [
        (64, 0, 31720, 492), (64, 0, 31720, 492), (64, 0, 31720, 492),
        (64, 0, 34900, 492), (64, 0, 31720, 492),
    ],
    ("block_diffusion", 7, "forward"): [
        (128, 0, 839120, 730), (128, 0, 857190, 599), (128, 0, 851850, 599),
        (128, 0, 840960, 711), (128, 0, 840960, 711),
    ],
    ("block_diffusion", 7, "backward"): [
        (128, 0, 838970, 655), (128, 0, 838310, 729), (128, 0, 838310, 729),
        (128, 0, 836800, 175), (128, 0, 836800, 175),
    ],
    ("block_diffusion", 50, "forward"): [
        (64, 0, 68270, 914), (64, 0, 95500, 914), (64, 0, 92470, 914),
        (64, 0, 72160, 914), (64, 0, 68270, 914),
    ],
    ("block_diffusion", 50, "backward"): [
        (82, 18, 77160, 914), (64, 0, 111100, 914), (82, 18, 84430, 914),
        (80, 15, 82810, 914), (64, 0, 107930, 914),
    ],
}  # fmt: skip


def measured(name: str, workers: int, direction: str) -> list[tuple[int, int, int, int]]:
    """Schedule a mask of the library at length 2000: few workers and a small L2, or the opposite."""
    e = masks.examples(2000)[name]
    block_mask = create_block_mask(e.mask, e.batch, e.heads, e.q_len, e.kv_len, BLOCK_SIZE=64)
    heads, l2_bytes = (4, 300_000) if workers == 7 else (2, 10**7)
    make = schedule_backward if direction == "backward" else schedule_forward
    found = []
    for order in ORDERS:
        schedule = make(block_mask.runs, Shape(e.batch, heads, 32768, kv_heads=2),
                        workers=workers, cost=COST, l2_bytes=l2_bytes, order=order)  # fmt: skip
        r = report(schedule, block_mask.runs, l2_bytes=l2_bytes)
        found.append((r.work_tile_count, r.split, r.makespan, round(1000 * r.reuse)))
    return found


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_schedules_are_as_good_as_before(case: tuple[str, int, str]) -> None:
    assert measured(*case) == MEASURED[case]
