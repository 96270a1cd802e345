"""The GPU backend in Triton: imported at its first use, never needed to import lineate."""
