"""Check the Blackwell kernels on a Blackwell GPU (these tests have not been run yet)."""

from __future__ import annotations

import pytest
import torch

from attnkit.schedule.targets import of_capability
from attnkit.testing.selfcheck import EXAMPLES, Example, examine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_kernels_are_those_of_the_oracle(example: Example) -> None:
    target = of_capability(torch.cuda.get_device_capability())
    if target is None or target.template != "sm100":
        pytest.skip("needs a GPU of compute capability 10.0 or 10.3")
    assert examine("cute", torch.device("cuda", torch.cuda.current_device()), (example,)) is None
