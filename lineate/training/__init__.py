"""Training: text to tokens to batches, the loop and its checkpoints, and torch's own engine to scale it out."""
