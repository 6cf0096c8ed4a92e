"""Check how captured tensors are passed to a kernel and which objects keep them alive."""

from __future__ import annotations

import torch

from attnkit.splice import Captured
from attnkit.splice.captured_arguments import (
    MASK,
    SCORE,
    captured_slot,
    own_tensors,
    read_captured,
    tensor_kinds,
)

CPU = torch.device("cpu")


def test_each_argument_is_found_at_each_call() -> None:
    def call() -> Captured:
        flags = torch.rand(5) > 0.5
        return Captured([torch.randn(3, 4), torch.randn(()), torch.randn(4, 3).mT], [flags])

    like, table = call(), torch.arange(4)
    slots = [captured_slot(SCORE, i, like, CPU) for i in (2, 0, 1)]
    arguments = (*slots, captured_slot(MASK, 0, like, CPU), table)
    for captured in (like, call()):
        read = read_captured(arguments, captured, CPU)
        assert read[0] is captured.scores[2]
        assert read[1] is captured.scores[0]
        assert read[2].shape == (1,)
        assert read[2].data_ptr() == captured.scores[1].data_ptr()
        assert read[3].dtype == torch.uint8
        assert torch.equal(read[3].bool(), captured.masks[0])
        assert read[4] is table
        # the caller's tensors are the caller's to keep
        own = own_tensors(arguments, read)
        assert [t.data_ptr() for t in own] == [t.data_ptr() for t in read[2:]]
    assert tensor_kinds(read) == (
        ("float32", 2, False),
        ("float32", 2, True),
        ("float32", 1, True),
        ("uint8", 1, True),
        ("int64", 1, True),
    )
