"""Provide ways to write to a tensor of document ids, some unseen by torch's version counter."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

# functions that copy the second tensor to the first, on the CPU
Writer: TypeAlias = Callable[[Tensor, Tensor], None]


def by_torch(t: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        t.copy_(new)


def by_data_of_another(t: Tensor, new: Tensor) -> None:
    t.data = new.clone()


def by_data(t: Tensor, new: Tensor) -> None:
    t.data[:] = new


def by_detached_numpy(t: Tensor, new: Tensor) -> None:
    t.detach().numpy()[:] = new.numpy()


def by_dlpack(t: Tensor, new: Tensor) -> None:
    torch.from_dlpack(t.detach()).copy_(new)


def by_storage(t: Tensor, new: Tensor) -> None:
    t.untyped_storage().copy_(new.clone().untyped_storage())


def by_memory(t: Tensor, new: Tensor) -> None:
    ctypes.memmove(t.data_ptr(), new.data_ptr(), new.numel() * new.element_size())


def by_set(t: Tensor, new: Tensor) -> None:
    with torch.no_grad():
        t.set_(new.clone())


def by_scatter(t: Tensor, new: Tensor) -> None:
    dist.scatter(t.detach(), [new], src=0)


def by_gather(t: Tensor, new: Tensor) -> None:
    dist.all_gather([t.detach()], new)


def by_broadcast(t: Tensor, new: Tensor) -> None:
    """Overwrite `t` with `new` by a gloo broadcast from a second rank, which is a thread."""
    store = dist.HashStore()
    options = dist.BroadcastOptions()
    options.rootRank = 1

    def rank(number: int, buffer: Tensor) -> None:
        group = dist.ProcessGroupGloo(store, number, 2, timedelta(seconds=60))
        group.broadcast([buffer], options).wait()

    other = threading.Thread(target=rank, args=(1, new))
    other.start()
    rank(0, t.detach())
    other.join()


WRITERS: dict[str, Writer] = {
    name.removeprefix("by_"): writer
    for name, writer in list(globals().items())
    if name.startswith("by_")
}


@contextmanager
def process_group(folder: Path) -> Iterator[None]:
    """Initialize a gloo process group with one rank inside the `with` block."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
