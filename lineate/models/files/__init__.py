"""Files of models: tensors on disk, checkpoints and their names on the hub, loading and saving."""
