"""The same stages in Gluon, for GPUs of compute capability 9.0."""
