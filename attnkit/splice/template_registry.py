"""Look up the forward and the backward template of a target.

Each template is imported at its first lookup: a process usually needs one architecture, and
inference needs no backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnkit.schedule.targets import Target

if TYPE_CHECKING:
    from attnkit.splice.backward_template import BackwardTemplate
    from attnkit.splice.forward_template import ForwardTemplate


def forward_template(target: Target) -> ForwardTemplate:
    """Return the `ForwardTemplate` (Hopper or Blackwell) of a target."""
    match target.template:
        case "sm90":
            from attnkit.splice import sm90

            return sm90.FORWARD
        case "sm100":
            from attnkit.splice import sm100

            return sm100.FORWARD
    raise AssertionError(f"template {target.template!r} has no forward here")


def backward_template(target: Target) -> BackwardTemplate:
    """Return the `BackwardTemplate` (Hopper or Blackwell) of a target."""
    match target.template:
        case "sm90":
            from attnkit.splice import sm90_backward

            return sm90_backward.BACKWARD
        case "sm100":
            from attnkit.splice import sm100_backward

            return sm100_backward.BACKWARD
    raise AssertionError(f"template {target.template!r} has no backward here")
