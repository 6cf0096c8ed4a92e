"""Pass the fingerprints of captured data to kernels that compare them beside their own work.

Hopper's forward compares them in idle warps, and the preprocess of a backward at its end. That
costs no launch. `fingerprint_check` has a kernel for all other calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnkit.splice.fingerprint_check import LARGEST, encode, kernel_words, stale_report
from attnkit.splice.runs_cache import wait_for_tables
from attnkit.util.data_state import DataState
from attnkit.util.fingerprint import CHUNK


@dataclass(frozen=True, eq=False)
class CheckTable:
    """Holds the table that a kernel reads to compare data with its fingerprints.

    It keeps the fingerprints alive, and not the data. The table must not be used after the memory
    of the data was freed.

    Attributes:
        rows: int64 [tensors, 5], see `templates.common.fingerprint.CheckedWord`.
        states: states of the data.
        expected: the fingerprints.
        owner: the guard whose number a report holds; kept alive, so that an error can name the
            tensor.
    """

    rows: Tensor
    states: tuple[DataState, ...]
    expected: tuple[Tensor, ...]
    owner: object

    def memory(self) -> list[Any]:
        """Return the storages of the data, to keep them alive."""
        return [m for s in self.states if (m := s.storage()) is not None]

    def reached(self) -> list[Tensor]:
        """Return the tensors to which the addresses in the table point, for the emulator."""
        data = [t for s in self.states if (t := s.recorded()) is not None]
        return [*data, *self.expected, stale_report.pinned()]


@dataclass(frozen=True, eq=False)
class DataCheck:
    """Holds the tables of the kernels of a call; two objects are equal only if identical.

    Attributes:
        forward: table of the forward kernel.
        backward: table of the preprocess kernel of the backward; None if it compares nothing.
        launch_backward: function that launches the separate kernel, before a backward whose
            kernels cannot compare data.
    """

    forward: CheckTable
    backward: CheckTable | None
    launch_backward: Callable[[], None]


def is_dense(state: DataState, device: torch.device) -> bool:
    """Return whether a table can describe the data: on this device, dense, of whole words."""
    t = state.recorded()
    return (
        t is not None
        and t.device == device
        and all(
            words.dtype == torch.int32 and words.ndim == 1 and words.stride(0) == 1
            for words in kernel_words(t)
        )
    )


def check_table(
    states: Mapping[int, DataState], number: int, owner: object = None
) -> CheckTable | None:
    """Build the table of data; None if there is none.

    Args:
        states: position -> state of data that the device compares, see `is_dense`.
        number: number of the guard, which `decode` returns.
        owner: the guard.
    """
    rows: list[list[int]] = []
    fingerprints: list[Tensor] = []
    report = stale_report.pinned().data_ptr()
    for position, state in states.items():
        data, expected = state.recorded(), state.expected
        assert data is not None
        assert expected is not None
        state.wait_until_recorded()
        fingerprints.append(expected)
        for words, sums in zip(kernel_words(data), expected.split(LARGEST // CHUNK), strict=True):
            place = words.data_ptr(), words.numel(), sums.data_ptr()
            rows.append([*place, report, encode(number, position)])
    if not rows:
        return None
    device = fingerprints[0].device
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(device)
    wait_for_tables(device)
    return CheckTable(table, tuple(states.values()), tuple(fingerprints), owner)
