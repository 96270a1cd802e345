"""Kernels of the memories that learn: they walk from chunk to chunk on a GPU."""
