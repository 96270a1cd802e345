"""Small tasks that distinguish the rules by recall, overwriting and state tracking."""

DEFAULT_RULES = "linear,gla,deltanet,gdn,kda,softmax"
"""The rules that a task compares by default."""
