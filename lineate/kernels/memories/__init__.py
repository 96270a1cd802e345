"""Kernels of the memories that learn, which walk from chunk to chunk on a GPU."""
