"""The stages of a call in Gluon, for GPUs of compute capability 9.0."""
