"""The GPU backend in Triton: its modules are imported at their first use, never needed to import lineate."""

CHUNKWISE_READS = ("q", "k", "v", "log_decay", "beta", "state", "cu_seqlens", "A_log", "dt_bias")
"""The tensors of a call that the stages of the chunkwise form read."""
RECURRENT_READS = ("q", "k", "v", "log_decay", "beta", "state", "cu_seqlens")
"""Those that the recurrent form reads, which is a decoding call on a copy of the state."""
DECODE_READS = ("q", "k", "v", "log_decay", "beta", "state", "cu_seqlens", "A_log", "dt_bias")
"""Those that a decoding call reads."""
STEP_READS = ("q", "k", "v", "log_decay", "beta", "state", "A_log", "dt_bias")
"""Those that a decoding step of a whole mixer reads."""
