"""The stages of a call in Triton, for any GPU that Triton compiles for."""
