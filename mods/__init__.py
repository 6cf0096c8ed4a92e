"""Build score_mods from the literature; `compose` applies several in order.

Each function returns a `score_mod(score, b, h, q, kv)`. Learned tables are tensors of the caller
and get gradients. `examples()` returns instances of all score_mods, for tests and benchmarks. This
package uses only the public API, as a user would.
"""

from __future__ import annotations

from attnkit import ScoreMod
from attnkit.mods._activation import log_relu, log_sigmoid
from attnkit.mods._alibi import alibi
from attnkit.mods._compose import compose
from attnkit.mods._decay import distance_decay, kerple
from attnkit.mods._examples import Example, examples
from attnkit.mods._forgetting import forgetting_gate
from attnkit.mods._full_bias import full_bias
from attnkit.mods._graphormer import graphormer
from attnkit.mods._head import head_gate, head_scale
from attnkit.mods._relative_bias import bias_2d, relative_bias
from attnkit.mods._sandwich import sandwich
from attnkit.mods._softcap import softcap
from attnkit.mods._t5_bias import t5_bias
from attnkit.mods._temperature import log_length, scalable_softmax

__all__ = [
    "Example",
    "ScoreMod",
    "alibi",
    "bias_2d",
    "compose",
    "distance_decay",
    "examples",
    "forgetting_gate",
    "full_bias",
    "graphormer",
    "head_gate",
    "head_scale",
    "kerple",
    "log_length",
    "log_relu",
    "log_sigmoid",
    "relative_bias",
    "sandwich",
    "scalable_softmax",
    "softcap",
    "t5_bias",
]
