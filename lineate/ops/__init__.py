"""The public ops: the rules, softmax attention, rules from raw gates, and decoding in place."""

from lineate.ops.general import diagonal_plus_low_rank, gated_delta_product, gated_delta_rule_2
from lineate.ops.inspection import AttendedStates, attend_keeping_states, attention_matrix
from lineate.ops.key_sums import divide_by_last, with_ones
from lineate.ops.rates import rate_of_key
from lineate.ops.rules import (
    Attended,
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
    "diagonal_plus_low_rank",
    "divide_by_last",
    "gated_delta_product",
    "gated_delta_rule",
    "gated_delta_rule_2",
    "gated_linear_attention",
    "kimi_delta_attention",
    "linear_attention",
    "rate_of_key",
    "softmax_attention",
    "with_ones",
]
