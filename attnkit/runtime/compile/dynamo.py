"""What torch.compile makes of a call: mods become graphs, what they capture becomes arguments.

Dynamo runs a mod on symbols as it runs any Python, so closures, attributes of modules, functions
made inside the compiled function and numbers of all kinds are its business, guards included. The
graph that it leaves is read here once more by `trace`. This module is imported by Dynamo alone,
and leans on parts of it that are not public: those that FlexAttention's own support is made of.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from attnkit.errors import AttnkitError
from attnkit.runtime.compile.hop import attend
from attnkit.runtime.compile.op import request_of
from attnkit.tracing.tracer import ARGUMENTS, Kind, Traced, trace
from attnkit.util.torch_private import dynamo_parts

_dynamo: Any = dynamo_parts()
_OperatorVariable: Any = _dynamo.OperatorVariable


class AttendVariable(_OperatorVariable):  # type: ignore[misc]
    """`hop.attend` while Dynamo runs it."""

    _HOP_NAME = "attnkit.flex_attention"

    def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        query, key, value, score_mod, mask_mod, lists, sizes, scale, *options = args
        score, scores = self._mod(tx, query, score_mod, "score")
        mask, masks = self._mod(tx, query, mask_mod, "mask")
        request = request_of(score, mask, *(o.as_python_constant() for o in options))
        proxy = tx.output.create_proxy(
            "call_function",
            torch.ops.attnkit.attention.default,
            (
                *(t.as_proxy() for t in (query, key, value)),
                *(scores, masks, list(lists.as_proxy()), list(sizes.as_proxy())),
                *(request.text, scale.as_proxy()),
            ),
            {},
        )
        return _dynamo.wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)

    def _mod(
        self, tx: Any, query: Any, function: Any, kind: Kind
    ) -> tuple[Traced | None, list[Any]]:
        """A mod's graph, and proxies of its captured tensors by slot."""
        if function.is_python_constant() and function.as_python_constant() is None:
            return None, []
        score = torch.float64 if query.dtype == torch.float64 else torch.float32

        def symbol(name: str) -> Any:
            dtype = score if name == "score" else torch.int32
            empty, made = (
                _dynamo.VariableTracker.build(tx, []),
                _dynamo.VariableTracker.build(tx, dtype),
            )
            return query.call_method(tx, "new_empty", [empty], {"dtype": made})

        with _dynamo.discard_graph_changes(tx):
            arguments = [symbol(name) for name in ARGUMENTS[kind]]
        with _dynamo.TransformGetItemToIndex():
            _, graph, captured = _dynamo.speculate_subgraph(
                tx,
                function,
                arguments,
                {},
                description=f"{self._HOP_NAME}: {kind}_mod",
                source_target=self.value,
                set_subgraph_inputs="flatten_manual",
            )
        body = _Body(tx, graph, list(captured))
        try:
            found = trace(body.run, kind, query.device)  # a method hides what is behind it
        except AttnkitError as error:
            raise _dynamo.UserError(
                _dynamo.UserErrorType.INVALID_INPUT, str(error).replace("_Body.run ", "")
            ) from error
        tensors = [body.proxy(t) for t in found.tensors]
        return replace(found, names=tuple(t.node.name for t in tensors)), tensors


class _Body:
    """A mod's graph as a function of symbols.

    What it computes of captured tensors alone is moved out, into the graph of the caller.

    Args:
        tx: the state of Dynamo.
        graph: of Dynamo, its arguments first, then what it captures.
        captured: the latter in the graph of the caller.
    """

    def __init__(self, tx: Any, graph: fx.Graph, captured: list[fx.Proxy]) -> None:
        self._tx, self._graph, self._captured = tx, graph, captured
        self.outer: dict[int, fx.Proxy] = {}  # by id of what stands for its value

    def run(self, *arguments: Any) -> Any:
        """The mod's value, of symbols by position."""
        count = len(arguments)
        known: dict[fx.Node, Any] = {}
        symbolic: set[fx.Node] = set()
        for node in self._graph.nodes:
            if node.op == "placeholder" and len(known) < count:
                symbolic.add(node)
                known[node] = arguments[len(known)]
            elif node.op == "placeholder":  # the length of a captured tensor is one too, unread
                captured = self._captured[len(known) - count]
                known[node] = self._value(captured) if node.users else None
            elif node.op == "output":
                return known[node.args[0]]
            elif symbolic.intersection(node.all_input_nodes):
                symbolic.add(node)
                known[node] = self._applied(node, known)
            elif node.op == "get_attr" or any(
                id(known[n]) in self.outer for n in node.all_input_nodes
            ):
                known[node] = self._value(self._moved(node, known))
            else:  # a constant
                known[node] = self._applied(node, known)
        raise AssertionError("a graph has an output")

    def _applied(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        """What a node does, done to symbols and constants."""
        found: Any = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        args, kwargs = found
        if node.target is _dynamo.mod_index:
            return args[0][tuple(args[1])]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _moved(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        """A node in the graph of the caller; numbers are numbers there too."""
        found = known.get(node)
        if id(found) in self.outer:
            return self.outer[id(found)]
        if node in known and not isinstance(found, Tensor):
            return found
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._moved(n, known))
        proxy = self._tx.output.create_proxy(node.op, node.target, args, kwargs)
        proxy.node.meta.update(node.meta)
        return proxy

    def proxy(self, t: Tensor) -> fx.Proxy:
        """What stands for a tensor in the graph of the caller; a table made inside joins it."""
        if id(t) not in self.outer:
            name = self._tx.output.install_global_by_id("attnkit_table", t)
            made = _dynamo.VariableTracker.build(self._tx, t, _dynamo.GlobalSource(name))
            self.outer[id(t)] = made.as_proxy()
        return self.outer[id(t)]

    def _value(self, proxy: fx.Proxy) -> Any:
        """What stands for a captured value: its fake tensor; a number is taken as it is."""
        value = proxy.node.meta["example_value"]
        if isinstance(value, torch.SymInt):
            return int(value)  # which Dynamo guards
        if isinstance(value, torch.SymFloat):
            return float(value)
        if isinstance(value, Tensor):
            self.outer[id(value)] = proxy
        return value


def register() -> bool:
    """Tell Dynamo what to do with `hop.attend`."""
    _dynamo.operator_variables[attend.__name__] = AttendVariable
    return True
