"""A fingerprint of the model that made a state, so that states on disk are never continued by another model."""

import hashlib
import json

import torch
from torch import Tensor

import lineate
from lineate.models.files.tiled import stored_tensors
from lineate.models.hybrid import HybridLM
from lineate.quantised.weight import QuantisedWeight

SAMPLES = 1024
"""Elements of each tensor that are hashed."""


def identity_of(model: HybridLM, state_dtype: str | None = None, state_rounding: str = "nearest") -> str:
    """Return a hash of the versions of lineate and torch, the configuration, the device, and the weights, 64 digits.

    Of each tensor its name, shape, dtype and 1024 elements are hashed, evenly spread from the first to the last, or all
    if it has fewer; of a quantised weight, its format, its codes and its scales. This takes milliseconds, or seconds
    for a model of many gigabytes on a GPU. Training, merging or rounding changes nearly all weights and is detected; a
    change of single elements of a large tensor may not be. The device and the versions are part of the hash, because
    others may compute other bits.

    Args:
        model: the model that reads and continues the states.
        state_dtype: the format of the memories of running rows; see Engine.
        state_rounding: the rounding of these memories; see Engine.
    """
    digest = hashlib.sha256()
    about: list[object] = [lineate.__version__, str(model.device), torch.__version__, model.config.to_dict()]
    if state_dtype not in (None, "float32"):
        about += [state_dtype, state_rounding]
    digest.update(json.dumps(about, sort_keys=True).encode())
    for name, x in sorted(model.state_dict().items()):
        for key, part in stored_tensors(name, x).items():
            seen = [x.format.name, str(x.dtype)] if isinstance(x, QuantisedWeight) else []
            digest.update(json.dumps([key, str(part.dtype), list(part.shape), *seen]).encode())
            digest.update(_sampled(part))
    return digest.hexdigest()


def _sampled(x: Tensor) -> bytes:
    """Return the bytes of evenly spread elements."""
    flat, count = x.detach().reshape(-1), x.numel()
    if count > SAMPLES:
        at = torch.arange(SAMPLES, device=x.device) * (count - 1) // (SAMPLES - 1)
        flat = flat[at]
    return bytes(flat.cpu().contiguous().view(torch.uint8).numpy())
