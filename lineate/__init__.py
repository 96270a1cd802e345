"""lineate: attention with a fixed-size memory, from linear attention to Kimi Delta Attention.

out, state = lineate.gated_delta_rule(q, k, v, log_decay, beta, normalize_qk=True)
out, state = lineate.gated_delta_rule(q2, k2, v2, log_decay2, beta2, state=state, normalize_qk=True)   # continue
"""

from typing import TYPE_CHECKING

import lineate.waiting  # noqa: F401  # before torch is loaded
from lineate.lazy import first_use

if TYPE_CHECKING:
    from lineate.decoding import decode
    from lineate.dispatch import Plan, explain
    from lineate.forms.softmax import KeyValueCache
    from lineate.fused import decay_gate, fused_delta_rule
    from lineate.ops import (
        Attended,
        AttendedStates,
        attend_keeping_states,
        attention_matrix,
        delta_rule,
        gated_delta_rule,
        gated_linear_attention,
        kimi_delta_attention,
        linear_attention,
        softmax_attention,
    )
    from lineate.stability import UnstableMemoryWarning
else:
    __getattr__, __dir__ = first_use(
        __name__,
        {
            "decoding": ("decode",),
            "dispatch": ("Plan", "explain"),
            "forms.softmax": ("KeyValueCache",),
            "fused": ("decay_gate", "fused_delta_rule"),
            "ops": (
                "Attended", "AttendedStates", "attend_keeping_states", "attention_matrix", "delta_rule",
                "gated_delta_rule", "gated_linear_attention", "kimi_delta_attention", "linear_attention",
                "softmax_attention",
            ),
            "stability": ("UnstableMemoryWarning",),
        },
    )  # fmt: skip

__version__ = "0.1.0"

__all__ = [
    "Attended",
    "AttendedStates",
    "KeyValueCache",
    "Plan",
    "UnstableMemoryWarning",
    "attend_keeping_states",
    "attention_matrix",
    "decay_gate",
    "decode",
    "delta_rule",
    "explain",
    "fused_delta_rule",
    "gated_delta_rule",
    "gated_linear_attention",
    "kimi_delta_attention",
    "linear_attention",
    "softmax_attention",
]
