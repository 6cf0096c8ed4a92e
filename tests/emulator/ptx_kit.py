"""Build and run small PTX kernels from a few instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

from attnkit import emulator

LETTER = {1: "h", 2: "h", 4: "r", 8: "d"}
LOAD = {1: "u8", 2: "b16", 4: "b32", 8: "b64"}


def kernel(body: str, params: str, *, arch: str = "sm_90a", variables: str = "") -> str:
    """Return a PTX module with one kernel `k` that has the given body and parameters.

    The kernel declares registers %p, %h, %r, %d and %q with numbers from 0.
    """
    return f"""
.version 8.8
.target {arch}
.address_size 64
.extern .shared .align 1024 .b8 dynamic[];
{variables}
.visible .entry k({params})
{{
    .reg .pred %p<40>;
    .reg .b16 %h<60>;
    .reg .b32 %r<400>;
    .reg .b64 %d<80>;
    .reg .b128 %q<8>;
{body}
    ret;
}}
"""


def pointers(n: int) -> str:
    """Return the declaration of n pointer parameters p0, p1, ..."""
    return ", ".join(f".param .u64 p{i}" for i in range(n))


def per_thread(instructions: str, inputs: list[Any], out: Any, arch: str = "sm_90a") -> str:
    """Return a kernel in which each thread runs `instructions` on one element of each input.

    In `instructions`, {a0}, {a1}, ... are the registers of the loaded elements, and {o} is the
    register that is stored.
    """
    code, names = ["mov.u32 %r99, %tid.x;"], {}
    for i, x in enumerate(inputs):
        size = x.dtype.itemsize
        reg = f"%{LETTER[size]}{40 + i}"
        names[f"a{i}"] = reg
        code += [
            f"ld.param.u64 %d50, [p{i}];",
            f"mul.wide.u32 %d51, %r99, {size};",
            "add.s64 %d52, %d50, %d51;",
            f"ld.global.{LOAD[size]} {reg}, [%d52];",
        ]
    size = out.dtype.itemsize
    names["o"] = f"%{LETTER[size]}0"
    code += [instructions.format(**names)]
    code += [
        f"ld.param.u64 %d50, [p{len(inputs)}];",
        f"mul.wide.u32 %d51, %r99, {size};",
        "add.s64 %d52, %d50, %d51;",
        f"st.global.{LOAD[size]} [%d52], {names['o']};",
    ]
    return kernel("\n".join(code), pointers(len(inputs) + 1), arch=arch)


def evaluate(instructions: str, inputs: list[Any], dtype: Any, arch: str = "sm_90a") -> Any:
    """Run `instructions` on each element of equally long inputs; return the results."""
    n = len(inputs[0])
    out = np.zeros(n, dtype)
    target = emulator.Ptx(per_thread(instructions, inputs, out, arch), block=(n, 1, 1))
    report = emulator.run(target, *inputs, out)
    assert report.ok
    return out


def run(body: str, *args: Any, mode: str = "eager", seed: int = 0, **launch: Any) -> Any:
    """Run a kernel with this body, whose pointer parameters p0, p1, ... are the arrays `args`.

    `launch` has options of `Ptx`, and `raises`, `variables`, `arch` and `limit`.
    """
    raises = launch.pop("raises", True)
    variables = launch.pop("variables", "")
    arch = launch.pop("arch", "sm_90a")
    limit = launch.pop("limit", 10**8)
    text = kernel(body, pointers(len(args)), arch=arch, variables=variables)
    target = emulator.Ptx(text, **launch)
    return emulator.run(target, *args, mode=mode, seed=seed, raises=raises, limit=limit)


INIT = """
    // one thread initialises an mbarrier at dynamic shared memory + {0}, with count {1}
    mov.u32 %r99, %tid.x;
    setp.ne.s32 %p9, %r99, 0;
    @%p9 bra $L_init_done_{0};
    mov.b32 %r98, {1};
    mbarrier.init.shared.b64 [dynamic+{0}], %r98;
    fence.mbarrier_init.release.cluster;
$L_init_done_{0}:
"""


def init_barriers(*pairs: tuple[int, int]) -> str:
    """Return code that initialises mbarriers at (offset, count) pairs and then synchronises."""
    return "".join(INIT.format(o, c) for o, c in pairs) + "    bar.sync 0;\n"


def wait(offset: str, parity: str, label: str) -> str:
    """Return a loop that waits for a phase of an mbarrier, as the compiler generates it."""
    return f"""
$L_wait_{label}:
    mbarrier.try_wait.parity.shared.b64 %p8, [{offset}], {parity}, 10000000;
    @%p8 bra $L_done_{label};
    bra $L_wait_{label};
$L_done_{label}:
"""
