"""The model that bench.models.quantised_weights measures, and its files for all contestants, made once and kept.

The shape is that of Qwen3.5-0.8B with a vocabulary of 16,384 tokens and a head of its own, in the classes of
Qwen3-Next, whose dense layers are the same: 24 layers, "GGGA", 530 million parameters at hidden 1024.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.serving.gguf_writer import write_gguf
from lineate import quantised
from lineate.models import HybridLM
from lineate.quantised.weight import kept_nbytes

VOCAB = 16384
BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}
"""The forms that weights are measured in, and their bits."""
GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}


@dataclass(frozen=True)
class Shape:
    """The sizes of the model.

    Args:
        layers: a multiple of 4.
        hidden: a multiple of 128.
    """

    layers: int = 24
    hidden: int = 1024

    def make(self) -> Any:
        """Return transformers' model with random weights."""
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

        heads = max(1, self.hidden // 128)
        config = Qwen3NextConfig(
            vocab_size=VOCAB, hidden_size=self.hidden, num_hidden_layers=self.layers,
            intermediate_size=7 * self.hidden // 2,
            num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), head_dim=256,
            linear_num_key_heads=2 * heads, linear_num_value_heads=2 * heads,
            linear_key_head_dim=128, linear_value_head_dim=128,
            mlp_only_layers=list(range(self.layers)), pad_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        model = Qwen3NextForCausalLM(config).eval()
        draw_weights(model)
        return model


SPREAD = 0.2  # of the logarithms of the sizes of rows and columns
ADDS = re.compile(r"(out_proj|o_proj|down_proj|experts_down)(\.|$)")
"""Names of the matrices whose products are added to the residual stream."""


@torch.no_grad()
def draw_weights(model: nn.Module, seed: int = 0) -> None:
    """Draw matrices with spreads like those of trained ones, and gains of norms that vary by a tenth.

    Embeddings have entries of size 1, and all blocks together add about as much to the residual stream. (A model that
    is only initialised has small embeddings, and its norms then magnify what is added, with all errors.) Other matrices
    keep the size of what they read. Rows and columns differ in size, and one entry of 1,000 is four times as large.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    added = sum(bool(ADDS.search(name)) for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        if "conv" in name:
            continue
        if parameter.dim() >= 2:
            *front, rows, columns = parameter.shape
            size = 1.0 if "embed" in name else columns**-0.5 / (added**0.5 if ADDS.search(name) else 1)
            factors = (SPREAD * normal(*front, rows, 1)).exp() * (SPREAD * normal(*front, 1, columns)).exp()
            drawn = normal(*parameter.shape).mul_(factors).mul_(size)
            drawn[torch.rand(parameter.shape, generator=generator) < 1e-3] *= 4
            parameter.copy_(drawn)
        elif "norm" in name:
            parameter.add_(0.1 * normal(*parameter.shape))


class Files:
    """The model's files in a folder: those of transformers, one GGUF a form, and lineate's of 8 and 4 bits.

    Args:
        folder: where models of all shapes are kept.
        shape: of the model.
    """

    def __init__(self, folder: Path, shape: Shape) -> None:
        self.shape = shape
        self.folder = folder / f"{shape.layers}x{shape.hidden}"
        self.checkpoint = self.folder / "checkpoint"
        if not (self.checkpoint / "config.json").exists():
            self.shape.make().save_pretrained(self.checkpoint)

    def prepare(self, forms: Sequence[str], with_gguf: bool) -> None:
        """Write all files that are not there yet."""
        for form in forms:
            if with_gguf:
                self.gguf(form)
            if BITS[form] < 16 and not self._small(form).exists():
                self.ours(form)

    def theirs(self, dtype: torch.dtype) -> Any:
        """Return transformers' model."""
        from transformers import Qwen3NextForCausalLM

        return Qwen3NextForCausalLM.from_pretrained(self.checkpoint, dtype=dtype).eval()

    def gguf(self, form: str) -> Path:
        """Return the GGUF file of a form; it is written if it is not there."""
        path = self.folder / f"{GGUF_TYPES[form]}.gguf"
        if not path.exists():
            part = path.with_suffix(".part")
            write_gguf(self.theirs(torch.float32), part, GGUF_TYPES[form])
            part.rename(path)
        return path

    def _small(self, form: str) -> Path:
        """Return the folder of lineate's quantised weights."""
        return self.folder / f"lineate-{form}"

    def ours(self, form: str) -> HybridLM:
        """Return lineate's model in a form, loaded as a user loads it.

        Weights of 16 bits are made while loading. Those of 8 and 4 are read from files, written if they are not there.
        """
        if form == "float32":
            return HybridLM.from_pretrained(self.checkpoint, progress=False)
        if BITS[form] == 16:
            return HybridLM.from_pretrained(self.checkpoint, progress=False, weights=form)
        folder = self._small(form)
        if not folder.exists():
            shrink(HybridLM.from_pretrained(self.checkpoint, progress=False), form).save_pretrained(folder)
        return HybridLM.from_pretrained(folder, progress=False)


# ---- quantised weights


def shrink(model: HybridLM, form: str) -> HybridLM:
    """Quantise a model's weights in place, and return it."""
    quantised.shrink(model, form)
    return model


def step_bytes(model: HybridLM) -> int:
    """Return the bytes of all weights that a decoding step reads: all but the rows of the embedding of other tokens."""
    skipped = None if model.config.tie_embeddings else "embed.weight"
    weights = [x for name, x in model.named_parameters() if name != skipped]
    return sum(map(kept_nbytes, weights))
