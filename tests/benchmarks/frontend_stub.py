"""Stand in for the module of nvidia-cudnn-frontend: its graphs of attention, in plain torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

GRAPHS: list[pygraph] = []  # those built, in order

data_type = SimpleNamespace(BFLOAT16=torch.bfloat16, HALF=torch.float16, FLOAT=torch.float32)
heur_mode = SimpleNamespace(A="A", FALLBACK="fallback")
diagonal_alignment = SimpleNamespace(TOP_LEFT="top left")


def create_handle() -> dict[str, int]:
    return {}


def set_stream(handle: dict[str, int], stream: int) -> None:
    handle["stream"] = stream


class Operand:
    def __init__(self) -> None:
        self.known: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def put(value: Any) -> Operand:
            self.known[name.removeprefix("set_")] = value
            return self

        return put


class pygraph:
    def __init__(self, handle: dict[str, int], **types: torch.dtype) -> None:
        self.types, self.options, self.wanted = types, dict[str, Any](), list[Operand]()
        GRAPHS.append(self)

    def tensor(self, dim: list[int], stride: list[int], data_type: torch.dtype) -> Operand:
        return Operand().set_dim(dim).set_stride(stride).set_data_type(data_type)

    def sdpa(self, **options: Any) -> list[Operand]:
        self.options, self.wanted = options, [Operand(), Operand()]
        return self.wanted

    def sdpa_backward(self, **options: Any) -> list[Operand]:
        self.options, self.wanted = options, [Operand(), Operand(), Operand()]
        return self.wanted

    def validate(self) -> None:
        assert all("dim" in o.known for o in self.wanted[:1])

    build_operation_graph = check_support = build_plans = lambda self: None

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes == ["A", "fallback"]

    def get_workspace_size(self) -> int:
        return 0

    def execute(
        self, pack: dict[Operand, Tensor], workspace: Tensor, handle: dict[str, int]
    ) -> None:
        assert handle == {"stream": 7}
        for operand, t in pack.items():
            assert operand.known["dim"] == list(t.shape)
            assert operand.known["stride"] == list(t.stride())
        names = ("q", "k", "v", "sink_token")
        inputs = [pack[self.options[n]] for n in names if n in self.options]
        leaves = [t.double().requires_grad_() for t in inputs]
        with torch.enable_grad():
            out, stats = self.attention(*leaves)
        if "dO" in self.options:
            assert torch.allclose(pack[self.options["stats"]].double(), stats)
            grads = torch.autograd.grad(out, leaves, pack[self.options["dO"]].double())
            wanted = [*self.wanted, self.options.get("dSink_token")]
        else:
            grads, wanted = (out, stats), self.wanted
        for operand, t in zip(wanted, grads, strict=False):
            if operand in pack:
                pack[operand].copy_(t.detach())

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return output and LSE, in the type of `q`."""
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = q @ k.mT * self.options["attn_scale"]
        i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
        left, right = (self.options[f"diagonal_band_{s}_bound"] for s in ("left", "right"))
        kept = torch.ones_like(scores, dtype=torch.bool)
        kept &= j <= i + right if right is not None else True
        kept &= j + left > i if left is not None else True
        scores = scores.masked_fill(~kept, -torch.inf)
        ends = [] if sink is None else [sink.expand(*scores.shape[:-1], 1)]
        stats = torch.cat([scores, *ends], -1).logsumexp(-1, keepdim=True)
        return torch.exp(scores - stats) @ v, stats
