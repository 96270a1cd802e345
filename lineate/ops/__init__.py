"""The public ops: the rules, softmax attention, rules from raw gates, and decoding in place."""

from lineate.ops.key_sums import divide_by_last, with_ones
from lineate.ops.rules import (
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

__all__ = [
    "Attended",
    "AttendedStates",
    "attend_keeping_states",
    "attention_matrix",
    "delta_rule",
    "divide_by_last",
    "gated_delta_rule",
    "gated_linear_attention",
    "kimi_delta_attention",
    "linear_attention",
    "softmax_attention",
    "with_ones",
]
