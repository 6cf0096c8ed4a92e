"""List the environment variables that attnkit reads, and read them.

`VARIABLES` is the one table: `attnkit doctor` prints it, the documentation shows it, and every
reader calls `read` or `read_prefixed`. The emulator stands alone and reads `CC` by itself.
"""

from __future__ import annotations

import os
from typing import NamedTuple


class Variable(NamedTuple):
    """Describes an environment variable.

    Attributes:
        name: its name; a final `*` stands for any ending.
        meaning: what it does.
        default: what holds if it is not set or empty.
    """

    name: str
    meaning: str
    default: str


VARIABLES = (
    Variable(
        "ATTNKIT_CACHE_DIR",
        "folder of compiled kernels",
        "`attnkit` in the cache folder of the system",
    ),
    Variable(
        "ATTNKIT_SHARED_CACHE_DIR",
        "another folder of compiled kernels, which is read only, and whose owner you trust",
        "none",
    ),
    Variable(
        "ATTNKIT_LOG",
        "`info` or `debug`: write the log to stderr",
        "off; a program's own `logging` decides",
    ),
    Variable(
        "ATTNKIT_PROGRESS",
        "`0`: show no progress line on a terminal",
        "`1`",
    ),
    Variable(
        "ATTNKIT_EMULATE_LINES",
        "`0`: compile emulated kernels without line numbers, which is faster; reports then have no "
        "places",
        "`1`",
    ),
    Variable(
        "ATTNKIT_EMULATE_MINUTES",
        "minutes that an emulated kernel may take by estimate; a longer one is refused",
        "`10`",
    ),
    Variable("CC", "C compiler that links kernels", "`cc`, `gcc` or `clang`"),
    Variable("TMPDIR", "folder for temporary files of compilations", "`/tmp`"),
    Variable("XDG_CACHE_HOME", "cache folder of the system on Linux", "`~/.cache`"),
    Variable("CUTE_DSL_LIBS", "runtime library of the CuTe DSL", "that of the installed package"),
    Variable(
        "CUTE_DSL_*",
        "settings of the CuTe DSL; those that may change code give kernels of their own in the cache",
        "the DSL's",
    ),
)
_NAMES = frozenset(variable.name for variable in VARIABLES)


def read(name: str) -> str:
    """Return the value of a variable of the table; "" if it is not set.

    Raises:
        KeyError: the table has no such variable.
    """
    if name not in _NAMES:
        raise KeyError(name)
    return os.environ.get(name, "")


def read_prefixed(prefix: str) -> dict[str, str]:
    """Return all variables that begin with `prefix`, as {name: value}, in alphabetical order.

    Raises:
        KeyError: the table has no variable `prefix` with a final `*`.
    """
    if f"{prefix}*" not in _NAMES:
        raise KeyError(f"{prefix}*")
    return {name: os.environ[name] for name in sorted(os.environ) if name.startswith(prefix)}


def current_value(variable: Variable) -> str:
    """Return what a variable is set to, as text for a reader; "" if it is not set."""
    if not variable.name.endswith("*"):
        return read(variable.name)
    values = read_prefixed(variable.name[:-1])
    return " ".join(f"{name}={value}" for name, value in values.items() if name not in _NAMES)
