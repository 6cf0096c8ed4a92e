"""Add a backend to diffusers' attention dispatcher; no other module uses private names of diffusers.

diffusers has no public function for it: its registry is a private class, and the names of backends
are members of an enum. tests/integrations/diffusers/test_dispatcher.py lists what is used.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from typing import Any

from attnkit.errors import UnsupportedError

_INSTALL = "run: pip install 'attnkit[diffusers]'"


def add_backend(name: str, function: Callable[..., Any]) -> None:
    """Make diffusers call `function` for the backend `name`; replace a backend of that name.

    Args:
        name: name of the backend, in lower case.
        function: has the arguments of diffusers' backends; arguments that its signature does not
            name are dropped by diffusers.

    Raises:
        UnsupportedError: diffusers is missing, or has no dispatcher that attnkit knows.
    """
    try:
        dispatch = importlib.import_module("diffusers.models.attention_dispatch")
        names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
        add, drop = registry.register, registry._supports_context_parallel.discard
    except ImportError as error:
        raise UnsupportedError(
            f"attnkit.integrations.diffusers needs diffusers with its attention dispatcher, which "
            f"cannot be imported ({error}); {_INSTALL}"
        ) from error
    except AttributeError as error:
        raise UnsupportedError(
            f"this version of diffusers has another attention dispatcher ({error}); {_INSTALL}"
        ) from error
    member = _member(names, name)
    add(member)(function)
    drop(name)  # one of diffusers' own names may be there


def _member(names: type[enum.Enum], value: str) -> enum.Enum:
    """Return the member of a string enum with this value; add one if there is none.

    Python has no public way to extend an enum. A member is an instance that its class lists by name
    and by value (Python's enum HOWTO, "Enum Classes"); lookup, iteration and pickling read these
    lists.
    """
    found: Any = names._value2member_map_.get(value)
    if found is None:
        found = str.__new__(names, value)  # type: ignore[type-var]
        found._name_ = value.upper()
        found._value_ = value
        found._sort_order_ = len(names)
        setattr(names, found._name_, found)
        names._member_names_.append(found._name_)
        names._member_map_[found._name_] = found
        names._value2member_map_[value] = found
    return found  # type: ignore[no-any-return]
