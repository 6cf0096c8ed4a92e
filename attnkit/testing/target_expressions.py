"""Evaluate expressions such as `sliding_window(64) & causal()` without running arbitrary code.

An expression consists of names, attributes, calls with literal arguments, methods of masks, and the
operators `&`, `|`, `^` and `~`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

from attnkit.errors import ArgumentError, AttnkitError
from attnkit.tracing.mask import Mask

_SIGNS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}


def evaluate(text: str, scope: Mapping[str, Any], where: str, *, factories: bool = False) -> Any:
    """Evaluate an expression of the restricted grammar above and return its value.

    Args:
        text: the expression.
        scope: values of the names that the expression may use.
        where: description of the scope, for error messages.
        factories: whether the name of a function without parentheses means a call of it.

    Raises:
        ArgumentError: the text is not such an expression, a name is unknown, or a call fails.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise ArgumentError(
            f"{text!r} is not a name or a call such as 'sliding_window(64)'"
        ) from None
    return _Reader(scope, where, factories).read(tree)


class _Reader:
    """Evaluates the syntax tree of an expression recursively."""

    def __init__(self, scope: Mapping[str, Any], where: str, factories: bool) -> None:
        self.scope = scope
        self.where = where
        self.factories = factories

    def read(self, n: ast.expr) -> Any:
        """Return the value of the subexpression `n`."""
        if isinstance(n, ast.BinOp) and type(n.op) in _SIGNS:
            left, right = self.read(n.left), self.read(n.right)
            return self._joined(n, lambda: _SIGNS[type(n.op)](left, right))
        if isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Invert):
            value = self.read(n.operand)
            return self._joined(n, lambda: ~value)
        if isinstance(n, ast.Call):
            return self._called(n)
        value = self._named(n)
        return (
            self._call(value, n, [], {}) if self.factories and inspect.isroutine(value) else value
        )

    def _joined(self, n: ast.expr, join: Callable[[], Any]) -> Any:
        try:
            return join()
        except TypeError as error:
            raise ArgumentError(f"{ast.unparse(n)}: {error}") from None

    def _named(self, n: ast.expr) -> Any:
        if isinstance(n, ast.Attribute):
            owner = self._named(n.value)
            if not hasattr(owner, n.attr):
                raise ArgumentError(f"{ast.unparse(n.value)} has no attribute {n.attr!r}")
            return getattr(owner, n.attr)
        if not isinstance(n, ast.Name):
            raise ArgumentError(
                f"{ast.unparse(n)!r} is not allowed here; use names, calls with literal arguments, "
                "and & | ^ ~"
            )
        if n.id not in self.scope:
            known = [name for name in self.scope if not name.startswith("_")]
            close = difflib.get_close_matches(n.id, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(known))}"
            raise ArgumentError(f"{self.where} has no {n.id!r}; {hint}")
        return self.scope[n.id]

    def _called(self, n: ast.Call) -> Any:
        function = self._method(n.func) or self._named(n.func)
        if not callable(function):
            raise ArgumentError(f"{ast.unparse(n.func)} is not a function: {function!r}")
        if any(k.arg is None for k in n.keywords):
            raise ArgumentError(f"{ast.unparse(n)}: ** is not allowed here")
        arguments = [_literal(a) for a in n.args]
        return self._call(
            function, n, arguments, {str(k.arg): _literal(k.value) for k in n.keywords}
        )

    def _method(self, n: ast.expr) -> Any:
        """Return the bound method if `n` is `(mask expression).shift`; None for a dotted name."""
        if not isinstance(n, ast.Attribute) or isinstance(n.value, ast.Name | ast.Attribute):
            return None
        owner = self.read(n.value)
        if isinstance(owner, Mask) and n.attr == "shift":
            return owner.shift
        raise ArgumentError(
            f"{ast.unparse(n)} is not allowed here; the one method is shift(...), of masks"
        )

    def _call(self, function: Any, n: ast.expr, args: list[Any], kwargs: dict[str, Any]) -> Any:
        shown = ast.unparse(n)
        signature = inspect.signature(function)
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            what = getattr(function, "__name__", type(function).__name__)
            raise ArgumentError(f"{shown}: {error}; it is {what}{signature}") from None
        return guarded(lambda: function(*args, **kwargs), shown)


def _literal(n: ast.expr) -> Any:
    try:
        return ast.literal_eval(n)
    except ValueError:
        raise ArgumentError(
            f"{ast.unparse(n)!r} is not a literal; arguments are numbers, strings, tuples and "
            "lists of them, None, True or False"
        ) from None


def guarded(make: Callable[[], Any], shown: str) -> Any:
    """Return `make()`; convert an error of the user's function to an ArgumentError.

    Args:
        make: function that makes the call.
        shown: the call as text, for the error message.
    """
    try:
        return make()
    except AttnkitError:
        raise
    except Exception as error:
        raise ArgumentError(f"{shown} raised {type(error).__name__}: {error}") from error
