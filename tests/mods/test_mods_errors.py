"""Check that errors about mods' arguments name the argument, its value and the expectation."""

from __future__ import annotations

import math
import re

import pytest
import torch

from attnkit import ArgumentError, DeviceError, DTypeError, OptionError, ShapeError, mods

ints = torch.ones(3, dtype=torch.int32)
floats = torch.ones(3)
table = torch.ones(2, 5)

REFUSED = [
    (lambda: mods.softcap(0), OptionError, "cap must be greater than 0, got 0"),
    (lambda: mods.softcap(math.inf), OptionError, "cap must be finite, got inf"),
    (lambda: mods.softcap(math.nan), OptionError, "cap must be finite, got nan"),
    (lambda: mods.softcap(floats), ArgumentError, "cap must be a number, got Tensor"),
    (lambda: mods.softcap(True), ArgumentError, "cap must be a number, got bool"),
    (lambda: mods.alibi(0), OptionError, "heads must be an int from 1 to 2147483647, got 0"),
    (lambda: mods.alibi(2.0), ArgumentError, "heads must be an int, got float"),
    (lambda: mods.alibi(ints), DTypeError, "heads must hold floats, got torch.int32"),
    (lambda: mods.alibi(table[None]), ShapeError, "heads must have shape [H] or [B, H], got (1, 2, 5)"),
    (lambda: mods.alibi(4, symmetric=1), ArgumentError, "symmetric must be True or False, got 1"),
    (lambda: mods.t5_bias(torch.ones(2, 32), bidirectional="no"), ArgumentError, "bidirectional must be True or False, got 'no'"),
    (lambda: mods.t5_bias(torch.ones(2, 32), max_distance=2**31), OptionError, "max_distance must be an int from 1 to 16777216, got 2147483648"),
    (lambda: mods.sandwich(4, 8, device="gpu"), DeviceError, "device must be a device of this machine, such as 'cpu', got 'gpu'"),
    (lambda: mods.softcap(10**400), OptionError, "cap must be finite as a float, got an int of 1329 bits"),
    (lambda: mods.head_scale(torch.ones(3).to_sparse()), ArgumentError, "scale must be dense, got torch.sparse_coo; pass scale.to_dense()"),
    (lambda: mods.head_scale(torch.ones(3, dtype=torch.complex64)), DTypeError, "scale must hold floats, got torch.complex64"),
    (lambda: mods.examples(dtype="float"), DTypeError, "dtype must be one of torch.float16"),
    (lambda: mods.compose(mods.alibi(4), mods.head_scale(floats)), ShapeError, "heads is for query heads 4 and scale for 3: they cannot be combined"),
    (lambda: mods.t5_bias(floats), ShapeError, "bias must have shape [H, buckets], got (3,)"),
    (lambda: mods.t5_bias(table), OptionError, "bias must have an even number of buckets, at least 4, got 5"),
    (lambda: mods.t5_bias(table[:, :2]), OptionError, "an even number of buckets, at least 4, got 2"),
    (lambda: mods.t5_bias(table[:, :1], bidirectional=False), OptionError, "bias must have at least 2 buckets, got 1"),
    (lambda: mods.t5_bias(torch.ones(2, 32), max_distance=8), OptionError, "max_distance must be greater than the 8 single distances, got 8"),
    (lambda: mods.relative_bias(table[:, :4]), ShapeError, "bias must have shape [H, 2 * W + 1], got (2, 4)"),
    (lambda: mods.relative_bias([[1.0]]), ArgumentError, "bias must be a tensor [H, 2 * W + 1], got list"),
    (lambda: mods.relative_bias(table.long()), DTypeError, "bias must hold floats, got torch.int64"),
    (lambda: mods.relative_bias(table[:0]), ShapeError, "bias must not be empty, got shape (0, 5)"),
    (lambda: mods.bias_2d(table), ShapeError, "bias must have shape [H, 2 * R - 1, 2 * C - 1], got (2, 5)"),
    (lambda: mods.bias_2d(torch.ones(1, 3, 4)), ShapeError, "bias must have shape [H, 2 * R - 1, 2 * C - 1], got (1, 3, 4)"),
    (lambda: mods.full_bias(floats), ShapeError, "bias must have shape [Sq, Skv], [H, Sq, Skv] or [B, H, Sq, Skv], got (3,)"),
    (lambda: mods.head_scale(table), ShapeError, "scale must have shape [H], got (2, 5)"),
    (lambda: mods.head_gate(ints), DTypeError, "gate must hold floats, got torch.int32"),
    (lambda: mods.log_length(1), OptionError, "trained must be an int from 2 to 2147483647, got 1"),
    (lambda: mods.log_length(8, 0), OptionError, "length must be an int from 1 to 2147483647, got 0"),
    (lambda: mods.log_length(8, floats), DTypeError, "length must hold integers (torch.int32), got torch.float32"),
    (lambda: mods.log_length(8, 0 * ints), OptionError, "length must be at least 1 everywhere, got 0"),
    (lambda: mods.scalable_softmax(1.0), ArgumentError, "scale must be a tensor [H], got float"),
    (lambda: mods.scalable_softmax(floats, -ints), OptionError, "length must be at least 1 everywhere, got -1"),
    (lambda: mods.distance_decay(0.5), ArgumentError, "rate must be a tensor [H], got float"),
    (lambda: mods.distance_decay(floats, 0), OptionError, "power must be greater than 0, got 0"),
    (lambda: mods.kerple(floats, ints), DTypeError, "scale must hold floats, got torch.int32"),
    (lambda: mods.kerple(floats, floats[:2]), ShapeError, "rate and scale must have the same shape [H], got (3,) and (2,)"),
    (lambda: mods.sandwich(0, 8), OptionError, "heads must be an int from 1 to 2147483647, got 0"),
    (lambda: mods.sandwich(4, 8, dims=7), OptionError, "dims must be even, got 7"),
    (lambda: mods.graphormer(table, floats[None]), DTypeError, "distance must hold integers (torch.int32), got torch.float32"),
    (lambda: mods.graphormer(table, 5 * ints[None]), OptionError, "distance must be from 0 to 4, got 5 to 5"),
    (lambda: mods.graphormer(table, -ints[None]), OptionError, "distance must be from 0 to 4, got -1 to -1"),
    (lambda: mods.graphormer(table, ints), ShapeError, "distance must have shape [N, N] or [B, N, N], got (3,)"),
    (lambda: mods.forgetting_gate(ints[None]), DTypeError, "sums must hold floats, got torch.int32"),
    (lambda: mods.forgetting_gate(floats[0]), ShapeError, "sums must have shape [H, S] or [B, H, S], got "),
    (lambda: mods.log_sigmoid(math.inf), OptionError, "bias must be finite, got inf"),
    (lambda: mods.log_relu(-1), OptionError, "power must be greater than 0, got -1"),
    (lambda: mods.compose(mods.softcap(2.0), 3), ArgumentError, "mods[1] must be a function score_mod(score, b, h, q, kv), got int"),
    (lambda: mods.examples(3), OptionError, "length must be an int from 4 to 2147483647, got 3"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[m for _, _, m in REFUSED])
def test_bad_argument(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()
