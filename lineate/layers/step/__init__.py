"""Decoding steps of layers: what a mixer's step computes (spec.py), in C on a CPU, in few launches on a GPU."""
