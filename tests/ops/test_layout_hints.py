"""If tensors have heads before tokens, as in other libraries, the shape errors suggest transpose(1, 2)."""

import pytest
import torch
from torch import Tensor

import lineate

B, T, H, HV, K, V = 2, 9, 2, 4, 6, 5


def call(*swapped: str, op: str = "gated_delta_rule", hv: int = HV, **changes: Tensor) -> None:
    """Call an op with the named tensors transposed."""
    tensors = {
        "q": torch.zeros(B, T, H, K), "k": torch.zeros(B, T, H, K), "v": torch.zeros(B, T, hv, V),
        "log_decay": torch.zeros(B, T, hv), "beta": torch.zeros(B, T, hv), "state": torch.zeros(B, hv, K, V),
    } | changes  # fmt: skip
    tensors |= {name: tensors[name].transpose(1, 2) for name in swapped}
    if op == "fused_delta_rule":
        names = {"log_decay": "gate", "beta": "write"}
        tensors = {names.get(name, name): x for name, x in tensors.items()} | {"A_log": torch.zeros(hv)}
    if op in ("linear_attention", "delta_rule"):
        del tensors["log_decay"]
    if op == "linear_attention":
        del tensors["beta"]
    getattr(lineate, op)(**tensors)


ALL = "; q, k and v look like (b, heads, t, ...): pass q.transpose(1, 2) and so on"
ONE = "; {0} looks like (b, heads, t, ...): pass {0}.transpose(1, 2)"
CASES = {
    "v": (("v",), {}, f"v must have shape (b, t, hv, v) with (b, t) = (2, 9), got (2, 4, 9, 5){ONE.format('v')}"),
    "k": (("k",), {}, f"k must have the shape of q, (b, t, h, k) = (2, 9, 2, 6), got (2, 2, 9, 6){ONE.format('k')}"),
    "q": (("q",), {}, f"k must have the shape of q, (b, t, h, k) = (2, 2, 9, 6), got (2, 9, 2, 6){ONE.format('q')}"),
    "beta": (("beta",), {}, f"or (b, t, hv, v) = (2, 9, 4, 5), got (2, 4, 9){ONE.format('beta')}"),
    "log_decay": (("log_decay",), {}, f"(b, t, hv) = (2, 9, 4), got (2, 4, 9){ONE.format('log_decay')}"),
    "all, grouped": (tuple("qkv"), {}, f"v must have shape (b, t, hv, v) with (b, t) = (2, 2), got (2, 4, 9, 5){ALL}"),
    "all": (tuple("qkv"), {"hv": H}, f"log_decay must have shape (b, t, hv) = (2, 2, 9), got (2, 9, 2){ALL}"),
    "all, delta": (tuple("qkv"), {"hv": H, "op": "delta_rule"}, f"got (2, 9, 2){ALL}"),
    "all, decode": (tuple("qkv"), {"hv": H, "op": "decode"}, f"got (2, 9, 2){ALL}"),
    "all, fused": (tuple("qkv"), {"hv": H, "op": "fused_delta_rule"}, f"got (2, 9, 2){ALL}"),
    "write, fused": (("beta",), {"op": "fused_delta_rule"}, f"got (2, 4, 9){ONE.format('write')}"),
    "all, with a state": (
        tuple("qkv"), {"hv": H, "op": "linear_attention"},
        f"state must have shape (b, hv, k, v) = (2, 9, 6, 5), got (2, 2, 6, 5){ALL}",
    ),
    "per channel": (
        ("log_decay",), {"op": "kimi_delta_attention", "log_decay": torch.zeros(B, T, HV, K)},
        f"got (2, 4, 9, 6){ONE.format('log_decay')}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_heads_before_tokens_are_recognised(name: str) -> None:
    swapped, changes, ending = CASES[name]
    with pytest.raises(ValueError) as raised:
        call(*swapped, **changes)  # type: ignore[arg-type]
    assert str(raised.value).endswith(ending)


@pytest.mark.parametrize("changes", [{"beta": torch.zeros(B, T, 8)}, {"v": torch.zeros(B, 7, HV, V)}], ids=list)
def test_other_shapes_get_no_hint(changes: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError) as raised:
        call(**changes)
    assert "transpose" not in str(raised.value)
