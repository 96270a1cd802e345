"""Parts of layers on a GPU: convolution, norms, gated units, rotary positions."""
