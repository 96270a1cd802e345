"""A decoding step of a whole model on tensors without memory, for the process in which kernels are lowered."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.decoding.in_place import state_in_place
from lineate.kernels import launching
from lineate.layers.configs import AttentionConfig, LatentConfig, LinearConfig, MambaConfig
from lineate.models import ExpertsConfig, FeedConfig, HybridConfig, HybridLM
from lineate.quantised import QuantisedWeight
from lineate.quantised.format import FORMATS
from lineate.torch_ops.invariance import batch_invariant

PRODUCTS = ((F, "linear"), (torch, "addmm"), (torch, "bmm"), (torch, "einsum"), (torch, "matmul"), (Tensor, "addmm_"))
"""The functions of torch whose kernels depend on the number of rows."""
CAPACITY = 500


def config_of(pattern: str, hidden: int, kind: str, taps: int) -> HybridConfig:
    shared_gate = kind == "swiglu"
    return HybridConfig(
        vocab_size=1000, hidden_size=hidden, n_layers=len(pattern), pattern=pattern,
        linear=LinearConfig(2, 4, 64, 64, conv_size=taps),
        attention=AttentionConfig(4, 2, 64, rotary_dim=32), latent=LatentConfig(4, 64, 32, 32, 32),
        mamba=MambaConfig(4, 64, 64, groups=2), feed=FeedConfig(384, kind),
        experts=ExpertsConfig(8, 2, 128, shared_size=128, shared_gate=shared_gate, kind=kind), dense_layers=(0,),
        tie_embeddings=shared_gate,
    )  # fmt: skip


def model_of(config: HybridConfig, dtype: str, form: str | None) -> HybridLM:
    """Return a model whose large weights are in a format of fewer bits."""
    model = HybridLM(config).eval().requires_grad_(False)
    model = model.to(torch.device("meta"), getattr(torch, dtype))
    wrapper = Tensor._make_wrapper_subclass

    def wrapped(cls: Any, shape: Any, **options: Any) -> Any:
        return wrapper(cls, shape, **options | {"device": torch.device("meta")})

    with mock.patch.object(Tensor, "_make_wrapper_subclass", staticmethod(wrapped)):
        for module in model.modules() if form is not None else ():
            for name, x in list(module.named_parameters(recurse=False)):
                if (type(module) is nn.Linear or "experts" in name) and FORMATS[form].fits(tuple(x.shape)):
                    kept = FORMATS[form]
                    parts = zip(kept.shapes(tuple(x.shape)), (kept.codes_dtype, kept.scales_dtype), strict=True)
                    codes, scales = (torch.empty(s, dtype=d, device="cuda") for s, d in parts)
                    weight = QuantisedWeight(codes, scales, tuple(x.shape), kept, x.dtype)
                    if name != "weight" or x.shape[0] > 8:  # routers and gates stay whole
                        setattr(module, name, nn.Parameter(weight, requires_grad=False))
    return model


@contextmanager
def no_products() -> Iterator[None]:
    """Let torch's products raise."""

    def refuse(*_: object, **named: object) -> None:
        raise AssertionError("a product of torch, whose bits depend on the number of rows")

    patches = [mock.patch.object(owner, name, refuse) for owner, name in PRODUCTS]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def whole_step(
    pattern: str,
    dtype: str,
    rows: int,
    invariant: bool,
    form: str | None = None,
    overlap: bool = False,
    hidden: int = 256,
    kind: str = "swiglu",
    taps: int = 4,
) -> None:
    """Read one token of each row.

    Args:
        pattern: The mixers.
        dtype: Of weights and activations.
        rows: The number of rows.
        invariant: Whether the step is batch-invariant; torch's products then raise.
        form: The format of large weights; None: dtype.
        overlap: Whether launches begin before those before them have ended.
        hidden: The channels of the residual stream.
        kind: Of the feed-forwards.
        taps: Of the convolutions; 0: there are none.
    """
    model = model_of(config_of(pattern, hidden, kind, taps), dtype, form)
    memories: dict[int, dict[str, Tensor]] = {}
    caches: dict[int, dict[str, Tensor]] = {}
    for n, specs in enumerate(model.state_spec):
        for spec in specs:
            kept, sizes = memories, [CAPACITY if size == "t" else int(size) for size in spec.shape]
            if "t" in spec.shape:
                kept = caches
            kept.setdefault(n, {})[spec.name] = torch.empty((rows, *sizes), dtype=spec.dtype, device="cuda")
    lengths = torch.empty(rows, dtype=torch.int64, device="cuda")
    ids = torch.empty(rows, 1, dtype=torch.int64, device="cuda")
    state = state_in_place(memories, caches, CAPACITY, lengths)
    overlapping = launching.overlapping() if overlap else nullcontext()
    with torch.no_grad(), overlapping, batch_invariant(invariant), no_products() if invariant else nullcontext():
        x, _ = model.hidden(model.embed(ids), state)
        logits = model.logits(x)
    assert logits.shape == (rows, 1, 1000)
