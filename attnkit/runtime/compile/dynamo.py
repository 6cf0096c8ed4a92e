"""Make Dynamo trace a call: score_mod and mask_mod become graphs, captured values arguments.

Dynamo traces a score_mod or mask_mod like any Python function. So it handles closures, attributes
of modules, functions defined inside the compiled function and numbers of all kinds, with their
guards. `tracing.tracer.trace` then traces the FX graph that Dynamo returns. This module is imported
only while Dynamo runs. It uses the private parts of Dynamo that support FlexAttention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from attnkit.errors import AttnkitError, TraceError
from attnkit.runtime.compile.hop import attend, operator_for
from attnkit.runtime.compile.op import request_of
from attnkit.runtime.torch_ops import refuse_transforms
from attnkit.tracing.tracer import ARGUMENTS, Kind, Traced, trace
from attnkit.util.arguments import refuse_dtensor
from attnkit.util.torch_private import dynamo_parts, is_batched

_dynamo: Any = dynamo_parts()
_OperatorVariable: Any = _dynamo.OperatorVariable


class AttendVariable(_OperatorVariable):  # type: ignore[misc]
    """Dynamo variable of `hop.attend`: replaces a call of it by an operator of attnkit."""

    _HOP_NAME = "attnkit.flex_attention"

    def _call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        query, key, value, score_mod, mask_mod, lists, sizes, sinks, rows, scale, *options = args
        try:
            for name, tensor in {"query": query, "key": key, "value": value}.items():
                refuse_dtensor(name, tensor.as_proxy().node.meta["example_value"])
        except AttnkitError as error:
            raise _dynamo.UserError(_dynamo.UserErrorType.INVALID_INPUT, str(error)) from error
        numbers = _Numbers(tx)
        inputs = [t.as_proxy().node.meta["example_value"] for t in (query, key, value)]
        learns = any(t.requires_grad for t in inputs)
        score, scores = self._mod(tx, query, score_mod, "score", numbers, learns)
        mask, masks = self._mod(tx, query, mask_mod, "mask", numbers, False)
        try:
            _refuse_transforms(
                [t.as_proxy() for t in (query, key, value)],
                [*scores, *masks, *sinks.as_proxy(), *lists.as_proxy()],
            )
        except AttnkitError as error:
            raise _dynamo.UserError(_dynamo.UserErrorType.INVALID_INPUT, str(error)) from error
        scale = scale.as_proxy()
        changes = isinstance(scale, fx.Proxy)
        floats = [*numbers.proxies[float], *([scale] if changes else [])]
        request = request_of(score, mask, *map(_constant, options))
        request = replace(request, float_scale=changes)
        arguments = (
            query.as_proxy(),
            key.as_proxy(),
            value.as_proxy(),
            [*scores, *sinks.as_proxy()],
            masks,
            list(lists.as_proxy()),
            list(sizes.as_proxy()),
            numbers.proxies[int],
            [numbers.as_tensor(proxy) for proxy in floats],
            request.text,
            None if changes else scale,
            *rows.as_proxy(),
        )
        operator = operator_for(rows.as_proxy())
        proxy = tx.output.create_proxy("call_function", operator, arguments, {})
        return _dynamo.wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)

    def _mod(
        self, tx: Any, query: Any, function: Any, kind: Kind, numbers: _Numbers, learns: bool
    ) -> tuple[Traced | None, list[Any]]:
        """Trace a score_mod or mask_mod; return its trace and proxies of its captured tensors.

        Args:
            tx: Dynamo's instruction translator.
            query: variable of the query.
            function: variable of the function, or of None.
            kind: "score" or "mask".
            numbers: the numbers of the call, to which those of the function are added.
            learns: whether scores require grad.
        """
        if function.is_python_constant() and function.as_python_constant() is None:
            return None, []
        score = torch.float64 if query.dtype == torch.float64 else torch.float32

        def symbol(name: str) -> Any:
            build = _dynamo.VariableTracker.build
            shape, dtype = build(tx, []), build(tx, score if name == "score" else torch.int32)
            options = {"dtype": dtype}
            if name == "score" and learns:
                # Dynamo then keeps the backward of an autograd.Function. It traces one only if it
                # must, because it cannot trace some.
                options["requires_grad"] = build(tx, True)
            return query.call_method(tx, "new_empty", [shape], options)

        with _dynamo.discard_graph_changes(tx):
            arguments = [symbol(name) for name in ARGUMENTS[kind]]
        with _dynamo.TransformGetItemToIndex(), _dynamo.changing_ints():
            _, graph, captured = _dynamo.speculate_subgraph(
                tx,
                function,
                arguments,
                {},
                description=f"{self._HOP_NAME}: {kind}_mod",
                source_target=self.value,
                set_subgraph_inputs="flatten_manual",
            )
        body = _Body(tx, graph, list(captured), numbers)
        try:
            traced = _trace(body, kind, query.device)
        except AttnkitError as error:
            raise _dynamo.UserError(
                _dynamo.UserErrorType.INVALID_INPUT, str(error).replace("_Body.run ", "")
            ) from error
        tensors = [body.proxy(t) for t in traced.tensors]
        return replace(traced, names=tuple(t.node.name for t in tensors)), tensors


def _constant(option: Any) -> Any:
    """Return the value of an option; with `dynamic=True`, Dynamo then guards on its integers."""
    try:
        return option.as_python_constant()
    except NotImplementedError:  # integers of a tuple that Dynamo made symbolic
        return tuple(
            int(n.node.meta["example_value"]) if isinstance(n, fx.Proxy) else n
            for n in option.as_proxy()
        )


def _refuse_transforms(query_key_value: Sequence[fx.Proxy], others: Sequence[fx.Proxy]) -> None:
    """Raise an UnsupportedError inside of a transform of torch.func that the operator would drop.

    torch computes an operator that has no tensor lists under vmap, once for each entry.
    """
    tensors = [p.node.meta["example_value"] for p in (*query_key_value, *others)]
    if not others:
        tensors = [t for t in tensors if not is_batched(t)]
    refuse_transforms(tensors)


def _trace(body: _Body, kind: Kind, device: torch.device) -> Traced:
    """Trace `body` with its changing numbers as inputs, or, if that fails, with their values.

    The second trace makes Dynamo guard on the values, so that each value compiles a graph.
    """
    before = body.numbers.copy()
    try:
        # a bound method: `trace` does not look for captured values behind it
        return trace(body.run, kind, device)
    except AttnkitError:
        if not body.reads_numbers:
            raise
    body.numbers.restore(before)
    body.guards_on_numbers = True
    return trace(body.run, kind, device)


class _Numbers:
    """Collects the numbers of a call that may change between calls, as inputs of its operator.

    Attributes:
        proxies: for int and for float, the proxies of the numbers in the caller's graph.
    """

    def __init__(self, tx: Any) -> None:
        self._tx = tx
        self.proxies: dict[type[int] | type[float], list[fx.Proxy]] = {int: [], float: []}

    def index(self, kind: type[int] | type[float], proxy: fx.Proxy) -> int:
        """Return the position of a number among those of its type; add it if it is new."""
        known = self.proxies[kind]
        place = next((i for i, p in enumerate(known) if p.node is proxy.node), len(known))
        if place == len(known):
            known.append(proxy)
        return place

    def copy(self) -> dict[type[int] | type[float], list[fx.Proxy]]:
        """Return a copy of `proxies` for `restore`."""
        return {kind: list(proxies) for kind, proxies in self.proxies.items()}

    def restore(self, proxies: dict[type[int] | type[float], list[fx.Proxy]]) -> None:
        """Forget the numbers that were added since `copy` returned `proxies`."""
        self.proxies = proxies

    def as_tensor(self, proxy: fx.Proxy) -> Any:
        """Return a float as a float64 tensor of shape [] on the CPU, in the caller's graph.

        An operator cannot take a float that changes: torch compiles again for each value. But it
        computes a product of a tensor and such a float with tensors.
        """
        create, options = self._tx.output.create_proxy, {"dtype": torch.float64, "device": "cpu"}
        one = create("call_function", torch.ones, ((),), options)
        product = create("call_function", torch.mul, (one, proxy), {})
        return _dynamo.wrap_fx_proxy(tx=self._tx, proxy=product, example_value=None).as_proxy()


class _Body:
    """Interprets the FX graph of a score_mod or mask_mod on the proxy values of a trace.

    Operations whose arguments are all captured tensors are moved into the caller's graph.

    Args:
        tx: Dynamo's instruction translator.
        graph: the FX graph. Its placeholders are the arguments of the function, then the captured
            values.
        captured: proxies of the captured values in the caller's graph.
        numbers: the changing numbers of the call, to which those of the function are added.

    Attributes:
        guards_on_numbers: whether changing numbers are replaced by their values, on which Dynamo
            guards then.
        reads_numbers: whether the last run has read a changing number.
    """

    def __init__(
        self, tx: Any, graph: fx.Graph, captured: list[fx.Proxy], numbers: _Numbers
    ) -> None:
        self._tx, self._graph, self._captured, self.numbers = tx, graph, captured, numbers
        self.outer: dict[int, fx.Proxy] = {}  # id of a value -> proxy in the caller's graph
        self.guards_on_numbers = False
        self.reads_numbers = False
        self._tracer: Any = None
        self._kept: list[Any] = []  # values whose ids `outer` holds

    def run(self, *arguments: Any) -> Any:
        """Run the graph on `arguments`, one per argument of the function; return its output."""
        count = len(arguments)
        self._tracer = arguments[0].tracer
        values: dict[fx.Node, Any] = {}
        symbolic: set[fx.Node] = set()
        for node in self._graph.nodes:
            if node.op == "placeholder" and len(values) < count:
                symbolic.add(node)
                values[node] = arguments[len(values)]
            elif node.op == "placeholder":  # also unused lengths of captured tensors
                captured = self._captured[len(values) - count]
                values[node] = self._value(captured) if node.users else None
            elif node.op == "output":
                return values[node.args[0]]
            elif node.op == "get_attr" and (body := self._module(str(node.target))) is not None:
                values[node] = body
            elif symbolic.intersection(node.all_input_nodes):
                symbolic.add(node)
                values[node] = self._apply(node, values)
            elif node.op == "get_attr" or any(
                id(values[n]) in self.outer for n in node.all_input_nodes
            ):
                values[node] = self._value(self._move_out(node, values))
            else:  # a constant
                values[node] = self._apply(node, values)
        raise AssertionError("a graph has an output")

    def _module(self, name: str) -> Any:
        """Return the graph that an autograd.Function names; None for the name of a tensor."""
        found = self._tx.output.nn_modules.get(name)
        return found if isinstance(found, fx.GraphModule) else None

    def _apply(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """Apply the operation of `node` to the values of its arguments; return the result."""
        arguments: Any = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        args, kwargs = arguments
        if node.target is _dynamo.mod_index:
            return args[0][tuple(args[1])]
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _move_out(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """Copy `node` into the caller's graph and return its proxy; return numbers unchanged."""
        value = values.get(node)
        if id(value) in self.outer:
            return self.outer[id(value)]
        if node in values and not isinstance(value, Tensor):
            return value
        if any(isinstance(values.get(n), fx.GraphModule) for n in node.all_input_nodes):
            raise TraceError(
                "an autograd.Function of captured tensors alone is not supported inside "
                "torch.compile; call it outside of the score_mod and capture its result, or call "
                "it with an element, as table[h, kv]"
            )
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self._move_out(n, values))
        proxy = self._tx.output.create_proxy(node.op, node.target, args, kwargs)
        proxy.node.meta.update(node.meta)
        return proxy

    def proxy(self, t: Tensor) -> fx.Proxy:
        """Return the proxy of `t` in the caller's graph; add `t` if the trace created it."""
        if id(t) not in self.outer:
            name = self._tx.output.install_global_by_id("attnkit_table", t)
            variable = _dynamo.VariableTracker.build(self._tx, t, _dynamo.GlobalSource(name))
            self.outer[id(t)] = variable.as_proxy()
        return self.outer[id(t)]

    def _value(self, proxy: fx.Proxy) -> Any:
        """Return a captured value by its proxy: a fake tensor, a number, or an unknown number."""
        value = proxy.node.meta["example_value"]
        if isinstance(value, torch.SymInt | torch.SymFloat):
            kind = int if isinstance(value, torch.SymInt) else float
            if self.guards_on_numbers or value.node.expr.is_number:
                return kind(value)
            self.reads_numbers = True
            value = self._tracer.unknown_number(self.numbers.index(kind, proxy), kind)
            self._kept.append(value)
        if isinstance(value, Tensor):
            self.outer[id(value)] = proxy
        return value


def register() -> bool:
    """Register `AttendVariable` for `hop.attend` with Dynamo; return True."""
    _dynamo.operator_variables[attend.__name__] = AttendVariable
    return True
