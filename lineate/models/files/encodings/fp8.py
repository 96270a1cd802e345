"""quant_method "fp8", as Qwen, DeepSeek and Kimi publish it: float8 (e4m3), with a scale for each block of a weight.

    X.weight            float8_e4m3fn `rows columns`
    X.weight_scale_inv  `ceil(rows / 128) ceil(columns / 128)`, by which the block is multiplied, despite its name

Without weight_block_size there is one scale, or one a row, `X.weight_scale_inv` or `X.weight_scale`. Experts that are
fused have `matrices rows columns` in X and their scales in X_scale_inv.
"""

import math

from lineate.models.files.encodings.encoded import Encoded, Stored
from lineate.models.files.encodings.plain import FLOAT8, PlainCodes, float8_format
from lineate.models.files.encodings.settings import Settings
from lineate.models.files.encodings.tensors import StoredTensors, placed, wrong_shape
from lineate.models.files.safetensors import CheckpointError

SUFFIXES = ("_scale_inv", "_scale")


def read(settings: Settings, tensors: StoredTensors) -> None:
    """Find the weights in float8 and their scales."""
    settings.word("fmt", allowed=("e4m3", "float8_e4m3fn"), default="e4m3")
    settings.word("expert_dtype", allowed=("fp8",), default="fp8", remedy="; experts of 4 bits are not read")
    block = settings.pair("weight_block_size")
    if settings.word("activation_scheme", allowed=("dynamic", "static"), default="dynamic") == "static":
        tensors.note_activations()
    for name, entry in tensors.entries.items():
        if entry.dtype == FLOAT8:
            scales = tensors.need(name, *(name + suffix for suffix in SUFFIXES))
            tensors.add(name, _encoded(Stored(name, entry), scales, block))
    if tensors.drop(r"\.(input|activation)_scale(_inv)?$"):
        tensors.note_activations()
    tensors.check_scales(r"weight_scale(_inv)?$")


def _encoded(codes: Stored, scales: Stored, block: tuple[int, int] | None) -> Encoded:
    shape = codes.entry.shape
    if len(shape) not in (2, 3):
        raise CheckpointError(f"{codes.entry.file}: {codes.name} must have 2 or 3 dimensions, got shape {shape}")
    *front, rows, columns = shape
    one = [((rows, columns), (*front, *ones)) for ones in ((), (1,), (1, 1))]
    choices = [*one, ((1, columns), (*front, rows, 1))]
    if block is not None:
        choices = [(block, (*front, math.ceil(rows / block[0]), math.ceil(columns / block[1])))]
        if codes.name.endswith("gate_up_proj") and rows // 2 % block[0]:
            raise CheckpointError(
                f"{codes.entry.file}: {codes.name} must have gate and up of whole blocks of {block[0]} rows, got "
                f"{rows // 2} rows each; use a checkpoint whose experts are stored one by one"
            )
    found = next((each for each, wanted in choices if scales.entry.shape == wanted), None)
    if found is None or not scales.entry.dtype.is_floating_point:
        shapes = " or ".join(str(wanted) for _, wanted in choices)
        what = "one scale, or one a row," if block is None else f"a scale for each block of {block[0]} x {block[1]}"
        raise wrong_shape(scales, f"floats of shape {shapes}", f"{what} of {codes.name} {shape}")
    parts = {"codes": codes, "scales": scales, "block": found, "form": float8_format(scales)}
    return PlainCodes(**placed(codes, shape), **parts)  # type: ignore[arg-type]
