"""The sizes and tensors of Mamba-2, shared by several families.

A checkpoint has the rows z | x | B | C | dt in in_proj, and x | B | C in the convolution; lineate's are C | B | x | z |
dt, and C | B | x.
"""

import math
from itertools import accumulate
from typing import Any

from lineate.models.config import MambaConfig
from lineate.models.families.builder import Part, PlanBuilder, Shape
from lineate.models.families.values import Values
from lineate.models.fields import show


def step_bounds(v: Values, *names: str) -> tuple[float, float | None]:
    """Return the smallest and the largest step, from the first of these keys; the latter is None if it is infinite."""
    given = v.get(*names)
    if given is None:
        return 0.0, None
    both = [_number(x) for x in given] if isinstance(given, list) else []
    if len(both) != 2 or not 0 <= both[0] < math.inf or not both[1] > 0:
        raise v.error(f"must have two numbers in {names[0]}, the second of which may be Infinity, got {show(given)}")
    return both[0], None if both[1] == math.inf else both[1]


def _number(value: Any) -> float:
    """Return a number of JSON; transformers writes an infinite one as {"__float__": "Infinity"}."""
    if isinstance(value, dict):
        value = {"Infinity": math.inf}.get(str(value.get("__float__")))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def mamba_sizes(
    v: Values, heads: str, head_dim: int, state: str, conv: str, *, groups: str, norm_groups: int, eps: float,
    bias: bool, conv_bias: bool,
) -> MambaConfig:  # fmt: skip
    """Return Mamba-2's sizes; heads, state, conv and groups are the names of keys, whose values differ by family."""
    least, most = step_bounds(v, "time_step_limit", "mamba_dt_limit")
    return MambaConfig(
        heads=v.number(heads), head_dim=head_dim, state_dim=v.number(state), groups=v.number(groups),
        conv_size=v.number(conv, default=4), conv_bias=conv_bias, bias=bias, norm_groups=norm_groups,
        step_least=least, step_most=most, norm_eps=eps,
    )  # fmt: skip


def expanded_mamba(v: Values, hidden: int, eps: float) -> MambaConfig:
    """Return the sizes as Bamba and Granite name them: mamba_expand times hidden channels in mamba_n_heads heads."""
    heads, inner = v.number("mamba_n_heads"), int(v.number("mamba_expand", default=2, kind=float) * hidden)
    auto = v.get("mamba_d_head") in (None, "auto")
    head_dim = inner // heads if auto else v.number("mamba_d_head")
    if heads * head_dim != inner:
        raise v.error(f"must have mamba_n_heads x mamba_d_head = {inner}, got {heads} x {head_dim}")
    return mamba_sizes(
        v, "mamba_n_heads", head_dim, "mamba_d_state", "mamba_d_conv", groups="mamba_n_groups", norm_groups=1, eps=eps,
        bias=v.flag("mamba_proj_bias", default=False), conv_bias=v.flag("mamba_conv_bias", default=True),
    )  # fmt: skip


def take_mamba(builder: PlanBuilder, layer: int, source: str) -> None:
    """Take in_proj, conv1d, dt_bias, A_log, D, norm and out_proj of a layer."""
    c, target = builder.config.mamba, f"layers.{layer}.mixer"
    assert c is not None
    hidden, inner, keys = builder.config.hidden_size, c.heads * c.head_dim, c.groups * c.state_dim
    for kind, tail in (("weight", (hidden,)), ("bias", ())):
        if kind == "weight" or c.bias:
            rows = _parts(f"{source}.in_proj.{kind}", (inner, inner, keys, keys, c.heads), tail)
            builder.stack(f"{target}.in_proj.{kind}", [rows[i] for i in (3, 2, 1, 0, 4)])
            shape: Shape = (hidden, inner) if kind == "weight" else (hidden,)
            builder.copy(f"{target}.out_proj.{kind}", f"{source}.out_proj.{kind}", shape)
        if kind == "weight" or c.conv_bias:
            taps: Shape = (1, c.conv_size) if kind == "weight" else ()
            rows = _parts(f"{source}.conv1d.{kind}", (inner, keys, keys), taps)
            builder.stack(f"{target}.conv.{kind}", rows[::-1])
    for name in ("A_log", "dt_bias", "D"):
        builder.copy(f"{target}.{name}", f"{source}.{name}", (c.heads,))
    builder.copy(f"{target}.norm.weight", f"{source}.norm.weight", (inner,))


def _parts(source: str, widths: tuple[int, ...], tail: Shape) -> list[Part]:
    """Return the rows of a tensor, cut into parts of these sizes."""
    shape = (sum(widths), *tail)
    return [Part(source, shape, (last - width, last)) for width, last in zip(widths, accumulate(widths), strict=True)]


def take_backbone_ends(builder: PlanBuilder) -> None:
    """Take embeddings, norm_f and lm_head, and set the prefix of the layers."""
    c = builder.config
    names = [(p, f"{p}{name}.weight") for p in ("backbone.", "model.", "") for name in ("embeddings", "embedding")]
    builder.prefix, embed = next(((p, name) for p, name in names if name in builder.shapes), names[0])
    builder.copy("embed.weight", embed, (c.vocab_size, c.hidden_size))
    builder.copy("norm.weight", f"{builder.prefix}norm_f.weight", (c.hidden_size,))
    if not c.tie_embeddings:
        builder.copy("head.weight", "lm_head.weight", (c.vocab_size, c.hidden_size))
    elif {"lm_head.weight", embed} <= builder.shapes.keys():
        builder.equal.append((embed, "lm_head.weight"))
