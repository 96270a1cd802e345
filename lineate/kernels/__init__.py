"""The GPU backend in Triton: its modules are imported at their first use, never needed to import lineate."""

from lineate.rule import DIAGONAL_PLUS_LOW_RANK, GATED_DELTA_2, GATED_DELTA_PRODUCT

CHUNKWISE_READS = ("q", "k", "v", "log_decay", "beta", "state", "cu_seqlens", "A_log", "dt_bias")
"""The tensors of a call that the stages of the chunkwise form read."""
STAGES_READ = (*CHUNKWISE_READS, "erase", "probe", "direction")
"""Those that the stages read; v is then the value that is written (general.py)."""
GENERAL_READS = ("q", "k", "v", "log_decay", "beta", "erase", "write", "probe", "direction", "state", "cu_seqlens")
"""Those that the chunkwise and the recurrent form of the general row read."""
GENERAL_RULES = (GATED_DELTA_2, GATED_DELTA_PRODUCT, DIAGONAL_PLUS_LOW_RANK)
"""The rules of the general row that it computes."""
RECURRENT_READS = ("q", "k", "v", "log_decay", "beta", "state", "cu_seqlens")
"""Those that the recurrent form reads, which is a decoding call on a copy of the state."""
DECODE_READS = ("q", "k", "v", "log_decay", "beta", "state", "cu_seqlens", "A_log", "dt_bias")
"""Those that a decoding call reads."""
RING_READS = ("q", "k", "v", "log_decay", "beta", "state", "A_log", "dt_bias")
"""Those that a decoding call with a ring reads."""
DECODE_GENERAL_READS = (*GENERAL_READS, "A_log", "dt_bias")
"""Those that a decoding call of the general row reads."""
DECODE_WRITES = 8
"""The most writes a token in a decoding call, whose vectors are all in registers."""
STEP_READS = ("q", "k", "v", "log_decay", "beta", "state", "A_log", "dt_bias")
"""Those that a decoding step of a whole mixer reads."""
