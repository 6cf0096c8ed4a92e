"""Run on the GPU what the emulator runs (same PTX, launches and arguments), and compare results.

The driver compiles PTX, and the DSL compiles its own kernels. The generated host code of a DSL
kernel runs as in the emulator, but with device addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attnkit import emulator
from attnkit.emulator.api import Report
from attnkit.emulator.host.host_function import Captured
from attnkit.emulator.launchables import Launchable
from attnkit.emulator.machine.global_memory import GlobalMemory, arrays, extent
from attnkit.emulator.machine.tensor_maps import decode, encode

_run = emulator.run


class DeviceMemory(GlobalMemory):
    """Hold copies of the arguments on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, tuple[Any, torch.Tensor]] = {}

    def add(self, name: str, array: Any, *, undefined: bool = False) -> int:
        """Copy `array` to the device once; return the address of the copy, 0 if it is empty."""
        address, size = extent(array)
        if not size:
            return 0
        if address not in self.copies:
            raw = np.ctypeslib.as_array((ctypes.c_ubyte * size).from_address(address))
            self.copies[address] = raw, torch.from_numpy(raw.copy()).cuda()
        return self.copies[address][1].data_ptr()

    def back(self) -> None:
        """Copy the device's data back to the host arrays."""
        for raw, copy in self.copies.values():
            raw[:] = copy.cpu().numpy()


@dataclass(frozen=True)
class Comparison:
    """Hold the differences between the emulator's and the GPU's results for the same arguments.

    Attributes:
        opcodes: executed instructions, by their first two parts.
        elements: number of values compared.
        different: number of values whose bits differ; NaN equals NaN.
        worst: largest difference of float32 and narrower floats, in units in the last place of the
            array's largest magnitude; 0 if no bits differ; None for integers that differ.
    """

    opcodes: frozenset[str]
    elements: int
    different: int
    worst: float | None


class Silicon:
    """Stand-in for `emulator.run` that runs both, compares, and leaves the GPU's results."""

    def __init__(self) -> None:
        self.comparisons: list[Comparison] = []

    def run(self, target: Launchable, *args: Any, **options: Any) -> Report:
        before = emulator.snapshot(args)
        report = _run(target, *args, **options)
        fit = f".target sm_{''.join(map(str, torch.cuda.get_device_capability()))}"
        lower = ".target sm_80"
        if report.findings or options.get("mode", "eager") != "eager":
            return report  # what is wrong with the kernel could hang the GPU
        if fit not in target.ptx and lower not in target.ptx:
            return report
        emulated = [_numbers(a).copy() for a in arrays(args)]
        emulator.restore(args, before)
        execute(target, args)
        ops = frozenset(".".join(op.split(".")[:2]) for s in report.launches for op in s.opcodes)
        found = [_numbers(a) for a in arrays(args)]
        self.comparisons.append(_compare(ops, emulated, found))
        return report


def execute(target: Launchable, args: Sequence[Any]) -> None:
    """Run one call of `target` on the GPU; write the results back to the argument arrays."""
    memory = DeviceMemory()
    for i, a in enumerate(arrays(args)):
        memory.add(f"argument {i}", a)
    moved = [_moved(a, memory) if isinstance(a, bytes) else a for a in args]
    code = getattr(target, "cubin", None) or target.ptx.encode() + b"\0"
    for launch in target.captured(moved, memory):
        _launch(code, launch)
    memory.back()


def _moved(raw: bytes, memory: DeviceMemory) -> bytes:
    """Return a tensor map with its address moved to the argument's copy on the device."""
    if len(raw) != 128:
        return raw
    tensor_map = decode(raw)
    for address, (host, copy) in memory.copies.items():
        if address <= tensor_map.base < address + host.size:
            moved = copy.data_ptr() + tensor_map.base - address
            return moved.to_bytes(8, "little") + encode(tensor_map)[8:]
    raise ValueError("a tensor map of memory that is no argument")


def _launch(code: bytes, c: Captured) -> None:
    from cuda.bindings import driver

    torch.cuda.current_stream().synchronize()  # makes torch's context current, too
    module = _checked(driver.cuModuleLoadData(code))
    function = _checked(driver.cuModuleGetFunction(module, c.kernel.name.encode()))
    limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, limit, c.shared))
    config, cluster = driver.CUlaunchConfig(), driver.CUlaunchAttribute()
    config.gridDimX, config.gridDimY, config.gridDimZ = c.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = c.block
    config.sharedMemBytes, config.hStream = c.shared, driver.CUstream(0)
    if c.cluster != (1, 1, 1):
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = c.cluster
        cluster.value = value
        config.attrs, config.numAttrs = [cluster], 1
    buffers = [
        ctypes.create_string_buffer(c.params[p.offset : p.offset + p.size], p.size)
        for p in c.kernel.params
    ]
    slots = (ctypes.c_void_p * max(len(buffers), 1))(*[ctypes.addressof(b) for b in buffers])
    _checked(driver.cuLaunchKernelEx(config, function, ctypes.addressof(slots), 0))
    _checked(driver.cuCtxSynchronize())
    _checked(driver.cuModuleUnload(module))


def _checked(result: tuple[Any, ...]) -> Any:
    from cuda.bindings import driver

    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(driver.cuGetErrorString(error)[1].decode())
    return values[0] if values else None


def _numbers(array: Any) -> Any:
    """Return the elements of an argument as a numpy array; bf16 becomes float32."""
    if isinstance(array, torch.Tensor):
        return (array.float() if array.dtype == torch.bfloat16 else array).numpy()
    return array


def _compare(opcodes: frozenset[str], first: list[Any], second: list[Any]) -> Comparison:
    elements = different = 0
    worst: float | None = 0.0
    for x, y in zip(first, second, strict=True):
        elements += x.size
        if x.dtype.kind != "f":
            wrong = int(np.count_nonzero(x != y))
            worst = None if wrong else worst
        else:
            bits = np.dtype(f"u{x.itemsize}")
            unequal = (x.view(bits) != y.view(bits)) & ~(np.isnan(x) & np.isnan(y))
            wrong = int(np.count_nonzero(unequal))
            if wrong and worst is not None:
                top = np.spacing(np.abs(x[np.isfinite(x)]).max(initial=0).astype(np.float32))
                with np.errstate(invalid="ignore"):
                    gap = np.abs(x[unequal].astype(np.float64) - y[unequal]) / float(top)
                worst = max(worst, float(np.nan_to_num(gap, nan=np.inf).max()))
        different += wrong
    return Comparison(opcodes, elements, different, worst)
