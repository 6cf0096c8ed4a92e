"""Build example instances of every score_mod of the library, for tests and benchmarks."""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from attnkit import DTypeError, ScoreMod
from attnkit.mods._activation import log_relu, log_sigmoid
from attnkit.mods._alibi import alibi
from attnkit.mods._check import FLOATS, flag, own_device, text, whole
from attnkit.mods._compose import compose
from attnkit.mods._decay import distance_decay, kerple
from attnkit.mods._forgetting import forgetting_gate
from attnkit.mods._full_bias import full_bias
from attnkit.mods._graphormer import graphormer
from attnkit.mods._head import head_gate, head_scale
from attnkit.mods._relative_bias import bias_2d, relative_bias
from attnkit.mods._sandwich import sandwich
from attnkit.mods._softcap import softcap
from attnkit.mods._t5_bias import t5_bias
from attnkit.mods._temperature import log_length, scalable_softmax


class Example(NamedTuple):
    """Holds a score_mod, sizes of a call that it allows, and its learned tensors."""

    mod: ScoreMod
    q_len: int
    kv_len: int
    batch: int
    heads: int
    learned: tuple[Tensor, ...] = ()


class _Draw:
    """Draws random tensors on the CPU and moves them to `device`; results depend only on `seed`."""

    def __init__(
        self, seed: int, device: torch.device, dtype: torch.dtype, requires_grad: bool
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype, self.requires_grad = device, dtype, requires_grad

    def learned(self, *shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
        """Draw a float tensor of `shape`, uniform between `low` and `high`, as a learned tensor."""
        drawn = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        values = (low + (high - low) * drawn).to(self.device, self.dtype)
        return values.requires_grad_(self.requires_grad)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        """Draw an int32 tensor of `shape` with values from `low` to `high - 1`."""
        drawn = torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)
        return drawn.to(self.device)


def examples(
    length: int = 128,
    heads: int = 4,
    batch: int = 2,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    requires_grad: bool = False,
    seed: int = 0,
) -> dict[str, Example]:
    """Build at least one instance of every score_mod of the library, for tests and benchmarks.

    Args:
        length: query and kv length, at least 4; `bias_2d` uses the largest square up to it.
        heads, batch: sizes of the head and batch axes of tables.
        device: device of the captured tensors.
        dtype: dtype of the learned tensors.
        requires_grad: whether the learned tensors require grad.
        seed: seed of the random tables; equal seeds give equal mods.

    Returns:
        Examples by name. A name is that of the score_mod, or "score_mod/variant".

    >>> sorted(examples())[:3]
    ['alibi', 'alibi/learned', 'alibi/shift']
    """
    whole("length", length, 4)
    whole("heads", heads, 1)
    whole("batch", batch, 1)
    whole("seed", seed, most=2**63 - 1)
    flag("requires_grad", requires_grad)
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise DTypeError(f"dtype must be one of {', '.join(map(str, FLOATS))}, got {text(dtype)}")
    draw = _Draw(seed, own_device("device", device), dtype, requires_grad)
    instances = _fixed(length, heads, draw.device) | _by_head(length, heads, batch, draw)
    instances |= _tables(length, heads, batch, draw)
    result = {}
    for name, (mod, *learned) in instances.items():
        size = math.isqrt(length) ** 2 if name == "bias_2d" else length
        result[name] = Example(mod, size, size, batch, heads, tuple(learned))
    return result


_Instances: TypeAlias = dict[str, tuple[ScoreMod, *tuple[Tensor, ...]]]


def _fixed(length: int, heads: int, device: torch.device) -> _Instances:
    return {
        "softcap": (softcap(5.0),),
        "alibi": (alibi(heads),),
        "alibi/symmetric": (alibi(heads, symmetric=True),),
        "sandwich": (sandwich(heads, length, dims=16, device=device),),
        "log_length": (log_length(max(2, length // 4)),),
        "log_length/constant": (log_length(max(2, length // 4), length),),
        "log_sigmoid": (log_sigmoid(-1.0),),
        "log_relu": (log_relu(),),
        "log_relu/power": (log_relu(1.5),),
        "alibi/shift": (alibi(heads, symmetric=True).shift(q=3, kv=1),),
        "compose": (compose(softcap(4.0), alibi(heads), log_sigmoid()),),
    }


def _by_head(length: int, heads: int, batch: int, draw: _Draw) -> _Instances:
    slopes, scale, gate = (draw.learned(heads, low=0.1) for _ in range(3))
    rate, reach, focus = (draw.learned(heads, low=0.1) for _ in range(3))
    lengths = draw.ints(1, length + 1, batch)
    return {
        "alibi/learned": (alibi(slopes), slopes),
        "head_scale": (head_scale(scale), scale),
        "head_gate": (head_gate(gate), gate),
        "distance_decay": (distance_decay(rate), rate),
        "distance_decay/power": (distance_decay(rate, 0.5), rate),
        "kerple": (kerple(rate, reach), rate, reach),
        "scalable_softmax": (scalable_softmax(focus), focus),
        "scalable_softmax/constant": (scalable_softmax(focus, length), focus),
        "scalable_softmax/batch": (scalable_softmax(focus, lengths), focus),
        "log_length/batch": (log_length(max(2, length // 4), lengths),),
        "compose/learned": (compose(head_scale(scale), alibi(slopes)), scale, slopes),
    }


def _tables(length: int, heads: int, batch: int, draw: _Draw) -> _Instances:
    reach, side, nodes = max(1, length // 8), math.isqrt(length), 6
    t5, decoder = draw.learned(heads, 16), draw.learned(heads, 8)
    near = draw.learned(heads, 2 * reach + 1)
    image = draw.learned(heads, 2 * side - 1, 2 * side - 1)
    square, shared = draw.learned(length, length), draw.learned(1, heads, 1, length)
    paths = draw.learned(heads, nodes)
    distance = draw.ints(0, nodes, batch, length, length)
    far = max(9, length // 2)
    sums, own_sums = draw.learned(heads, length), draw.learned(batch, heads, length)
    return {
        "t5_bias": (t5_bias(t5, max_distance=far), t5),
        "t5_bias/decoder": (t5_bias(decoder, bidirectional=False, max_distance=far), decoder),
        "relative_bias": (relative_bias(near), near),
        "bias_2d": (bias_2d(image), image),
        "forgetting_gate": (forgetting_gate(sums), sums),
        "forgetting_gate/batch": (forgetting_gate(own_sums), own_sums),
        "full_bias": (full_bias(square), square),
        "full_bias/shared": (full_bias(shared), shared),
        "graphormer": (graphormer(paths, distance[0]), paths),
        "graphormer/batch": (graphormer(paths, distance), paths),
    }
