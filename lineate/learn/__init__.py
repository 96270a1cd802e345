"""Twelve lessons from softmax attention to Kimi Delta Attention: `lineate learn`, docs/learn."""
