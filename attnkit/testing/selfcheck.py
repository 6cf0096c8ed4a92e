"""Test kernels against dense attention: `python -m attnkit.testing.selfcheck cute cuda:0`.

The exit status is 0 if all results are right, 10 if a result is wrong and 11 if a call failed. The
last line of the output describes the error. Any other status means that the check itself failed.
`attnkit.runtime.hardware_gate` runs the check once on a GPU on which the kernels have not been
verified, before it uses them there. `python -m attnkit.testing.selfcheck emulate:sm_100a cpu` runs
the same check in the emulator with small sizes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnkit.errors import AttnkitError
from attnkit.runtime.variant import Variant
from attnkit.testing.kernels import compare

RIGHT, WRONG, FAILED = 0, 10, 11  # exit status; Python itself uses 1 and 2


class Failure(NamedTuple):
    """Describes the first error that the check finds.

    Attributes:
        text: name of the example and description of the error.
        in_numbers: True if a result is wrong; False if the call raised, for example out of memory.
    """

    text: str
    in_numbers: bool


@dataclass(frozen=True)
class Example:
    """Describes one attention call to test.

    Attributes:
        name: name of the variant.
        variant: function (length, number of heads, device) -> `Variant`.
        head_dim: head dim of query, key and value.
        group: query heads per kv head.
    """

    name: str
    variant: Callable[[int, int, torch.device], Variant]
    head_dim: int = 128
    group: int = 1


def _causal(b: Any, h: Any, q: Any, kv: Any) -> Any:
    return q >= kv


def _packed(length: int, heads: int, device: torch.device) -> Variant:
    ids = torch.arange(length, device=device) // max(1, length // 5)
    return Variant(
        lambda score, b, h, q, kv: 20.0 * torch.tanh(score / 20.0),
        lambda b, h, q, kv: (ids[q] == ids[kv]) & (q >= kv),
    )


def _biased(length: int, heads: int, device: torch.device) -> Variant:
    slopes = 0.5 ** torch.arange(1.0, heads + 1, device=device)
    return Variant(lambda score, b, h, q, kv: score - slopes[h] * (q - kv), _causal)


EXAMPLES = (
    Example("full", lambda *_: Variant()),
    Example("causal, shared kv heads", lambda *_: Variant(None, _causal), 64, 4),
    Example("softcap, packed documents", _packed),
    Example("ALiBi, causal", _biased, 64),
    Example("causal", lambda *_: Variant(None, _causal), 256),
    Example("causal", lambda *_: Variant(None, _causal), 512),
)


def examine(
    backend: str, device: torch.device, examples: tuple[Example, ...] = EXAMPLES
) -> Failure | None:
    """Run examples with the kernels of `backend` until one fails.

    Args:
        backend: "cute", or "emulate:" followed by an architecture.
        device: device of the tensors.
        examples: the calls to test.

    Returns:
        The first failure; None if all examples pass.
    """
    for example in examples:
        for text, in_numbers in _failures(example, backend, device):
            return Failure(f"{example.name}, D = {example.head_dim}: {text}", in_numbers)
    return None


def _failures(example: Example, backend: str, device: torch.device) -> Iterator[Failure]:
    """Run the forward and backward of one example and yield each failure."""
    # long enough for several work tiles per CTA, reuse of every pipeline stage, and ragged tiles
    length, heads, batch = (1500, 16, 2) if device.type == "cuda" else (420, example.group, 1)
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        shape = batch, count, length, example.head_dim
        return torch.randn(shape, generator=generator).to(device, torch.bfloat16)

    qkv = [draw(heads), draw(heads // example.group), draw(heads // example.group)]
    try:
        errors = compare(
            example.variant(length, heads, device), qkv, backend=backend, backward=True
        )
    except (AttnkitError, RuntimeError) as error:
        yield Failure(f"{type(error).__name__}: {error}", in_numbers=False)
        return
    yield from (Failure(str(error), in_numbers=True) for error in errors if not error.ok)


def main(arguments: list[str]) -> int:
    """Test kernels; `arguments` are [backend, device]. Print the result, return the exit status."""
    backend, device = arguments
    failure = examine(backend, torch.device(device))
    sys.stdout.write(f"{failure.text if failure else 'all is right'}\n")
    if failure is None:
        return RIGHT
    return WRONG if failure.in_numbers else FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
