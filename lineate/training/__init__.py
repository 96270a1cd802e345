"""Training: tokens and batches from text, the loop, its checkpoints, and training on several processes."""
