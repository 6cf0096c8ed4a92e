"""Find the forward and the backward of a target's template."""

from __future__ import annotations

from attnkit.schedule.targets import Target
from attnkit.splice import sm90, sm90_backward, sm100, sm100_backward
from attnkit.splice.template import BackwardTemplate, ForwardTemplate


def forward_template(target: Target) -> ForwardTemplate:
    """Return the forward of a target's template."""
    templates = {"sm90": sm90.FORWARD, "sm100": sm100.FORWARD}
    return templates[target.template]


def backward_template(target: Target) -> BackwardTemplate:
    """Return the backward of a target's template."""
    templates = {"sm90": sm90_backward.BACKWARD, "sm100": sm100_backward.BACKWARD}
    return templates[target.template]
