"""lineate: attention with a fixed-size memory, from linear attention to Kimi Delta Attention.

out, state = lineate.gated_delta_rule(q, k, v, log_decay, beta, normalize_qk=True)
out, state = lineate.gated_delta_rule(q2, k2, v2, log_decay2, beta2, state=state, normalize_qk=True)   # continue
"""

import sys
from typing import TYPE_CHECKING

import lineate.system.waiting  # noqa: F401  # before torch is loaded
from lineate.system.lazy import first_use
from lineate.system.renamed import Renamed, renamed

if TYPE_CHECKING:
    from lineate.dispatch import Plan, explain
    from lineate.forms.stability import UnstableMemoryWarning
    from lineate.ops import (
        Attended,
        AttendedStates,
        attend_keeping_states,
        attention_matrix,
        delta_rule,
        diagonal_plus_low_rank,
        gated_delta_product,
        gated_delta_rule,
        gated_delta_rule_2,
        gated_linear_attention,
        kimi_delta_attention,
        linear_attention,
        rate_of_key,
        softmax_attention,
    )
    from lineate.ops.decoding import decode
    from lineate.ops.raw_gates import decay_gate, fused_delta_rule
    from lineate.ops.softmax import KeyValueCache
else:
    __getattr__, __dir__ = first_use(
        __name__,
        {
            "ops.decoding": ("decode",),
            "dispatch": ("Plan", "explain"),
            "ops.softmax": ("KeyValueCache",),
            "ops.raw_gates": ("decay_gate", "fused_delta_rule"),
            "ops.rings": ("Ring",),
            "ops": (
                "Attended", "AttendedStates", "attend_keeping_states", "attention_matrix", "delta_rule",
                "diagonal_plus_low_rank", "gated_delta_product", "gated_delta_rule", "gated_delta_rule_2",
                "gated_linear_attention", "kimi_delta_attention", "linear_attention", "rate_of_key",
                "softmax_attention",
            ),
            "forms.stability": ("UnstableMemoryWarning",),
        },
    )  # fmt: skip

if not any(isinstance(finder, Renamed) for finder in sys.meta_path):
    sys.meta_path.insert(0, Renamed(renamed()))  # before the finder of files, which would load a module twice

__version__ = "0.2.0"

__all__ = [
    "Attended",
    "AttendedStates",
    "KeyValueCache",
    "Plan",
    "Ring",
    "UnstableMemoryWarning",
    "attend_keeping_states",
    "attention_matrix",
    "decay_gate",
    "decode",
    "delta_rule",
    "diagonal_plus_low_rank",
    "explain",
    "fused_delta_rule",
    "gated_delta_product",
    "gated_delta_rule",
    "gated_delta_rule_2",
    "gated_linear_attention",
    "kimi_delta_attention",
    "linear_attention",
    "rate_of_key",
    "softmax_attention",
]
