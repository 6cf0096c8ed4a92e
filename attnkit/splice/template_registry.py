"""Find the forward and the backward of a target's template.

Each is imported when it is first asked for: a process uses one architecture, and inference uses no
backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnkit.schedule.targets import Target

if TYPE_CHECKING:
    from attnkit.splice.backward_template import BackwardTemplate
    from attnkit.splice.forward_template import ForwardTemplate


def forward_template(target: Target) -> ForwardTemplate:
    """Return the forward of a target's template."""
    match target.template:
        case "sm90":
            from attnkit.splice import sm90

            return sm90.FORWARD
        case "sm100":
            from attnkit.splice import sm100

            return sm100.FORWARD
    raise AssertionError(f"template {target.template!r} has no forward here")


def backward_template(target: Target) -> BackwardTemplate:
    """Return the backward of a target's template."""
    match target.template:
        case "sm90":
            from attnkit.splice import sm90_backward

            return sm90_backward.BACKWARD
        case "sm100":
            from attnkit.splice import sm100_backward

            return sm100_backward.BACKWARD
    raise AssertionError(f"template {target.template!r} has no backward here")
