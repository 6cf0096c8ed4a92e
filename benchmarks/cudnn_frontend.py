"""Call attention of cuDNN through its own Python frontend, which has more than SDPA passes on.

The frontend is the package nvidia-cudnn-frontend. Its module is an argument here, not an import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "HALF", torch.float32: "FLOAT"}


@cache
def _handle(create: Callable[[], Any]) -> Any:
    """Return the handle of the process, since each holds memory of the device."""
    return create()


@dataclass(frozen=True)
class Plan:
    """Hold a graph that is built, and run it on PyTorch's current stream.

    Attributes:
        cudnn: the frontend's module.
        graph: the graph, a `cudnn.pygraph`.
        operands: its inputs and outputs, in the order of the tensors of `run`.
        workspace: memory that the graph needs while it runs, uint8.
    """

    cudnn: Any
    graph: Any
    operands: tuple[Any, ...]
    workspace: Tensor

    @classmethod
    def of(cls, cudnn: Any, graph: Any, operands: tuple[Any, ...], device: torch.device) -> Plan:
        """Build a graph with the plan that cuDNN's heuristics put first."""
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        size = max(graph.get_workspace_size(), 1)
        return cls(cudnn, graph, operands, torch.empty(size, dtype=torch.uint8, device=device))

    def run(self, *tensors: Tensor) -> None:
        """Run the graph on its inputs and outputs."""
        handle = _handle(self.cudnn.create_handle)
        self.cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        # Detached, since the exchange of tensors may refuse one that requires grad.
        buffers = {o: t.detach() for o, t in zip(self.operands, tensors, strict=True)}
        self.graph.execute(buffers, self.workspace, handle=handle)


class Attention:
    """Compute attention and its gradients for the sizes of one problem.

    Args:
        cudnn: the frontend's module.
        query, key, value: [B, H, S, D] with the sizes and strides of each call. Key and value may
            have fewer heads. There is a backward if `query` requires grad.
        sink: float32 [heads], or None.
        causal: whether a query attends to no later keys.
        window: how many keys a query attends to at most, up to itself; None for no limit.
    """

    def __init__(
        self,
        cudnn: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None = None,
        causal: bool = False,
        window: int | None = None,
    ) -> None:
        self.cudnn, self.device, self.trains = cudnn, query.device, query.requires_grad
        self.dtype = getattr(cudnn.data_type, DTYPES[query.dtype])
        self.out_size = (*query.shape[:-1], value.shape[-1])
        self.stats_size = (*query.shape[:-1], 1)
        # The left bound keeps kv + bound > q, the right one keeps kv <= q + bound.
        self.options = {
            "attn_scale": query.shape[-1] ** -0.5,
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_left_bound": window,
            "diagonal_band_right_bound": 0 if causal else None,
        }
        self.forward_plan = self._forward_plan(query, key, value, sink)
        self.backward_plan = self._backward_plan(query, key, value, sink) if self.trains else None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, sink: Tensor | None) -> Tensor:
        """Return the output, [B, H, S, D]; it is differentiable if there is a backward."""
        out: Tensor = _Call.apply(self, query, key, value, sink)  # type: ignore[no-untyped-call]
        return out

    def forward(self, *inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the output and, if there is a backward, the LSE of each row."""
        given = [_shaped(t) for t in inputs if t is not None]
        out = given[0].new_empty(self.out_size)
        stats = torch.empty(self.stats_size, device=self.device) if self.trains else None
        self.forward_plan.run(*given, out, *([] if stats is None else [stats]))
        return out, stats

    def backward(self, grad: Tensor, out: Tensor, stats: Tensor, *inputs: Tensor) -> list[Tensor]:
        """Return the gradients of `inputs`, which are query, key, value and perhaps the sink."""
        assert self.backward_plan is not None
        given = [_shaped(t) for t in inputs]
        grads = [torch.empty_like(t) for t in given]
        self.backward_plan.run(*given, out, grad.contiguous(), stats, *grads)
        return [g.view_as(t) for g, t in zip(grads, inputs, strict=True)]

    def _graph(self) -> Any:
        wide = self.cudnn.data_type.FLOAT
        return self.cudnn.pygraph(
            io_data_type=self.dtype, intermediate_data_type=wide, compute_data_type=wide,
            handle=_handle(self.cudnn.create_handle),
        )  # fmt: skip

    def _like(self, graph: Any, t: Tensor) -> Any:
        """Declare an operand of the sizes, strides and type of a tensor."""
        kind = getattr(self.cudnn.data_type, DTYPES[t.dtype])
        return graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=kind)

    def _forward_plan(self, *inputs: Tensor | None) -> Plan:
        graph = self._graph()
        q, k, v, *sink = (self._like(graph, _shaped(t)) for t in inputs if t is not None)
        out, stats = graph.sdpa(
            q=q, k=k, v=v, generate_stats=self.trains, **self.options,
            **({"sink_token": sink[0]} if sink else {}),
        )  # fmt: skip
        found = [_output(out, torch.empty(self.out_size, device="meta"))]
        if self.trains:
            _output(stats, torch.empty(self.stats_size, device="meta"))
            found.append(stats.set_data_type(self.cudnn.data_type.FLOAT))
        return Plan.of(self.cudnn, graph, (q, k, v, *sink, *found), self.device)

    def _backward_plan(self, *inputs: Tensor | None) -> Plan:
        graph = self._graph()
        given = [_shaped(t) for t in inputs if t is not None]
        q, k, v, *sink = (self._like(graph, t) for t in given)
        sized = given[0].new_empty(self.out_size, device="meta")
        out, grad = self._like(graph, sized), self._like(graph, sized)
        stats = self._like(graph, torch.empty(self.stats_size, device="meta"))
        sink_grad = [self._like(graph, t) for t in given[3:]]  # cuDNN sums it over the batch
        grads = graph.sdpa_backward(
            q=q, k=k, v=v, o=out, dO=grad, stats=stats, **self.options,
            **({"sink_token": sink[0], "dSink_token": sink_grad[0]} if sink else {}),
        )  # fmt: skip
        for g, t in zip(grads, given, strict=False):
            _output(g, t)
        operands = (q, k, v, *sink, out, grad, stats, *grads, *sink_grad)
        return Plan.of(self.cudnn, graph, operands, self.device)


def _shaped(t: Tensor) -> Tensor:
    """Return a sink as cuDNN wants it, [1, heads, 1, 1]; leave other tensors."""
    return t.view(1, -1, 1, 1) if t.dim() == 1 else t


def _output(operand: Any, like: Tensor) -> Any:
    """Declare an operand as an output of the size and strides of a tensor."""
    return operand.set_output(True).set_dim(list(like.shape)).set_stride(list(like.stride()))


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        attention: Attention,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
    ) -> Tensor:
        out, stats = attention.forward(query, key, value, sink)
        ctx.attention = attention
        ctx.save_for_backward(out, stats, query, key, value, *([] if sink is None else [sink]))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = ctx.attention.backward(grad, *ctx.saved_tensors)
        return None, *grads, *([None] * (4 - len(grads)))
