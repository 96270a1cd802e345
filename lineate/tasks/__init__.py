"""Small tasks that tell the rules apart: what each can recall, overwrite and keep track of."""

DEFAULT_RULES = "linear,gla,deltanet,gdn,kda,softmax"
"""The rules that a task compares by default."""
