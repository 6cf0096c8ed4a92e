"""List the GPU architectures that have kernels, and say why others have none."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from attnkit.errors import ArgumentError
from attnkit.util import caches

EMULATED = "emulate:"  # prefix of a GPU template that runs in the emulator
ORDERED = ":ordered"  # suffix of a GPU template that computes sums in a fixed order


@dataclass(frozen=True)
class Target:
    """Describes a GPU architecture and the template that is compiled for it.

    Attributes:
        name: name in a plan, such as "sm103".
        template: name of the template, such as "sm100".
        arch: name for the compiler, such as "sm_103a".
        card: NVIDIA's name for such GPUs.
        capability: compute capability of the GPUs that run it.
        proven: whether its kernels have run on such a GPU; if not, `backend="auto"` tests them on
            the machine at hand before it uses them.
    """

    name: str
    template: str
    arch: str
    card: str
    capability: tuple[int, int]
    proven: bool = False

    @property
    def standing(self) -> str:
        """Return a phrase that says where the target's kernels have been tested."""
        if self.proven:
            return "tested on GPUs and in the emulator"
        return "executed in the emulator, never run on silicon"


SM90 = Target("sm90", "sm90", "sm_90a", "Hopper", (9, 0), proven=True)
SM100 = Target("sm100", "sm100", "sm_100a", "Blackwell", (10, 0))
SM103 = Target("sm103", "sm100", "sm_103a", "Blackwell Ultra", (10, 3))
TARGETS = (SM90, SM100, SM103)

_NO_TENSOR_MEMORY = (
    "has neither tensor memory nor tcgen05 instructions, of which the Blackwell kernel is made"
)


def of_arch(arch: str) -> Target | None:
    """Return the target of an architecture such as "sm_100a", or None if there is none."""
    return next((t for t in TARGETS if t.arch == arch), None)


def of_capability(capability: tuple[int, int] | None) -> Target | None:
    """Return the target for GPUs of a compute capability, or None if there is none."""
    return next((t for t in TARGETS if t.capability == capability), None)


def of_template(template: str) -> Target | None:
    """Return the target of a template name, ignoring prefix and suffix, or None if it has none."""
    return TemplateSpec.parse(template).target


@dataclass(frozen=True)
class TemplateSpec:
    """Holds the parts of a template name such as "emulate:sm90:ordered".

    Attributes:
        name: the name without prefix and suffix.
        target: the GPU architecture of the template; None if it is no GPU template.
        emulated: whether the kernels are executed in the emulator.
        deterministic: whether the backward computes its sums in a fixed order.
    """

    name: str
    target: Target | None
    emulated: bool = False
    deterministic: bool = False

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def parse(template: str) -> TemplateSpec:
        """Split a template's name into its parts."""
        name = template.removeprefix(EMULATED).removesuffix(ORDERED)
        target = next((t for t in TARGETS if t.name == name), None)
        return TemplateSpec(name, target, template.startswith(EMULATED), template.endswith(ORDERED))


caches.register(TemplateSpec.parse.cache_clear)


def gpu_target(template: str) -> Target:
    """Return the target of a GPU template.

    Raises:
        ArgumentError: it is no GPU template.
    """
    target = of_template(template)
    if target is None:
        raise ArgumentError(f"template={template!r} is no GPU kernel")
    return target


def missing_arch(arch: str) -> str:
    """Return a message that says why there is no kernel for an architecture."""
    number = arch.removeprefix("sm_").rstrip("af")
    if number.startswith("12") and len(number) == 3:
        return f"{arch} {_NO_TENSOR_MEMORY}; {_kernel_list()}"
    return f"{arch} is not an architecture with a kernel; {_kernel_list()}"


def missing_capability(capability: tuple[int, int]) -> str:
    """Return a message that says why there is no kernel for GPUs of a compute capability."""
    why = f"the GPU has compute capability {capability[0]}.{capability[1]}"
    if capability[0] == 12:
        why += f", which {_NO_TENSOR_MEMORY}"
    listing = ", ".join(f"{t.capability[0]}.{t.capability[1]} ({t.card})" for t in TARGETS)
    return f"{why}; there are kernels for {listing}"


def _kernel_list() -> str:
    return f"there are kernels for {', '.join(t.arch for t in TARGETS)}"
