"""RWKV-7 in two layouts: as its authors publish it, and as flash-linear-attention saves it; both are `rwkv7`.

    authors'    emb, blocks.N.{ln0, ln1, ln2}, blocks.N.att.{x_r, .., w0, w1, w2, .., receptance, .., ln_x},
                blocks.N.ffn.{x_k, key, value}, ln_out, head; matrices of low rank are (in, out)
    fla's       model.embeddings, model.layers.N.{pre_norm, attn_norm, ffn_norm}, model.layers.N.attn.{x_r, ..,
                w_lora.lora.0, .., r_proj, .., g_norm}, model.layers.N.ffn.{x_k, key, value}, model.norm, lm_head

The authors publish no config.json. One that has only `"model_type": "rwkv7"` is enough for tensors of their layout:
all sizes are read from the shapes, as far as config.json does not name them as flash-linear-attention does.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from lineate.layers.configs import rwkv_rank
from lineate.models.config import FeedConfig, HybridConfig, RwkvConfig
from lineate.models.families.builder import Part, PlanBuilder, Shape
from lineate.models.families.family import CheckpointFamily
from lineate.models.families.values import Values
from lineate.models.fields import show
from lineate.models.files.loading import LoadingPlan, Piece

MIXTURES = {"q": "r", "decay": "w", "k": "k", "v": "v", "rate": "a", "gate": "g"}
"""The token shifts by their names here, and the letters of both layouts, in the order of the old x_x."""
LOW_RANK = {"decay": "w", "rate": "a", "value_mix": "v", "gate": "g"}
"""The projections of low rank, and their letters."""
UNUSED = r"^blocks\.0\.att\.v[012]$"
"""Tensors of the authors' layout that the first layer may have, and that nothing reads."""
EPS = 1e-5


def config_from(values: dict[str, Any]) -> HybridConfig:
    """Read config.json; keys that are absent have the values of flash-linear-attention's class."""
    v = Values("rwkv7", values)
    v.must_be("hidden_act", "sqrelu", "no other activation is supported")
    v.must_be("attn", None, "layers of softmax attention are not supported")
    v.must_be("norm_bias", True, "norms without a bias are not supported")
    hidden, n_layers = v.number("hidden_size"), v.layers()
    heads, dim = _heads(v, hidden)
    eps, factor = v.number("norm_eps", default=EPS, kind=float), dim / 64

    def rank(name: str, usual: int, multiple: float) -> int:
        usual = rwkv_rank(hidden, multiple) if name in v.values else usual  # null is the authors' formula
        return int(v.number(name, default=usual))

    return HybridConfig(
        vocab_size=v.number("vocab_size"),
        hidden_size=hidden,
        n_layers=n_layers,
        pattern="V",
        rwkv=RwkvConfig(
            heads, dim, value_dim=_value_dim(v, hidden, heads, dim, n_layers),
            decay_rank=rank("decay_low_rank_dim", 64, 2.5 * factor),
            rate_rank=rank("a_low_rank_dim", 64, 2.5 * factor),
            value_rank=rank("v_low_rank_dim", 16, 1.7 * factor),
            gate_rank=rank("gate_low_rank_dim", 128, 5.0),
            norm_eps=dim * eps,
        ),
        feed=FeedConfig(_feed_size(v, hidden), "channel_mix"),
        norm="layer",
        norm_eps=eps,
        embedding_norm=v.flag("norm_first", default=True),
        tie_embeddings=v.flag("tie_word_embeddings", default=False),
        max_position=v.longest("max_position_embeddings"),
        bos_token_id=v.token("bos_token_id"),
        eos_token_ids=v.eos(),
        pad_token_id=v.token("pad_token_id"),
        family="rwkv7",
    )  # fmt: skip


def _heads(v: Values, hidden: int) -> tuple[int, int]:
    """Return the heads and the channels of a head, which together are all channels."""
    given = v.number("num_heads", default=None)
    if given is not None and v.get("head_dim", default=64) is None:
        dim = hidden // given
    else:
        dim = v.number("head_dim", default=64)
    heads = hidden // dim if dim else 0
    if heads * dim != hidden or given not in (None, heads):
        raise v.error(f"must have num_heads x head_dim = hidden_size = {hidden}, got {show(given)} x {dim}")
    return heads, dim


def _value_dim(v: Values, hidden: int, heads: int, dim: int, n_layers: int) -> int | None:
    """Return the channels of a value; None if they are those of a key."""
    given = v.get("value_dim")
    widths = set(v.numbers("value_dim")) if isinstance(given, list) else {v.number("value_dim", default=hidden)}
    if (isinstance(given, list) and len(given) != n_layers) or len(widths) != 1 or min(widths) % heads:
        raise v.error(
            f"must have the same value_dim in all {n_layers} layers, a multiple of {heads} heads, got {show(given)}"
        )
    value = min(widths) // heads
    return None if value == dim else value


def _feed_size(v: Values, hidden: int) -> int:
    ratio = v.number("hidden_ratio", default=4, kind=float)
    return int(v.number("intermediate_size", default=-(-int(hidden * ratio) // 32) * 32))


def complete(values: dict[str, Any], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return config.json with the sizes that it lacks, of tensors in the authors' layout."""
    numbers = [int(x[1]) for x in (re.match(r"blocks\.(\d{1,6})\.", name) for name in shapes) if x]
    if not numbers:
        return values
    found: dict[str, Any] = {"num_hidden_layers": max(numbers) + 1}
    for source, names in {
        "emb.weight": ("vocab_size", "hidden_size"),
        "blocks.0.att.r_k": ("num_heads", "head_dim"),
        "blocks.0.ffn.key.weight": ("intermediate_size", ""),
        "blocks.0.att.w1": ("", "decay_low_rank_dim"),
        "blocks.0.att.a1": ("", "a_low_rank_dim"),
        "blocks.1.att.v1": ("", "v_low_rank_dim"),
        "blocks.0.att.g1": ("", "gate_low_rank_dim"),
    }.items():
        if len(shape := shapes.get(source, ())) == 2:
            found |= {name: size for name, size in zip(names, shape, strict=True) if name}
    return {**found, **values}


def plan(config: HybridConfig, shapes: Mapping[str, Shape]) -> LoadingPlan:
    """Return where every tensor of the model comes from."""
    builder = PlanBuilder(config, shapes)
    if "emb.weight" in shapes or "blocks.0.att.r_k" in shapes:
        _take_authors(builder)
    else:
        _take_fla(builder)
    made = builder.plan()
    return replace(made, ignored=(*made.ignored, UNUSED))


def _take_authors(builder: PlanBuilder) -> None:
    """Take a model in the authors' layout."""
    c = builder.config
    _take_ends(builder, "emb.weight", "blocks.0.ln0", "ln_out", "head.weight")
    for i in range(c.n_layers):
        source, target, att = f"blocks.{i}", f"layers.{i}", f"blocks.{i}.att"
        _take_norm(builder, f"{target}.mixer_norm", f"{source}.ln1")
        _take_norm(builder, f"{target}.feed_norm", f"{source}.ln2")
        for name, letter in MIXTURES.items():
            _vector(builder, f"{target}.mixer.shift_{name}", f"{att}.x_{letter}", c.hidden_size)
        for name, letter, rank, size in _low_ranks(c, i):
            into = f"{target}.mixer.{name}"
            down, up = f"{att}.{letter}1", f"{att}.{letter}2"
            builder.stack(f"{into}.down.weight", [Part(down, (rank, c.hidden_size), turned=True)])
            builder.stack(f"{into}.up.weight", [Part(up, (size, rank), turned=True)])
            if name != "gate":
                _vector(builder, f"{into}.offset", f"{att}.{letter}0", size)
        names = {"q_proj": "receptance", "k_proj": "key", "v_proj": "value", "out_proj": "output"}
        _take_shared(builder, i, att, f"{source}.ffn", names, "ln_x")


def _take_fla(builder: PlanBuilder) -> None:
    """Take a model in the layout of flash-linear-attention."""
    c = builder.config
    _take_ends(builder, "model.embeddings.weight", "model.layers.0.pre_norm", "model.norm", "lm_head.weight")
    for i in range(c.n_layers):
        source, target, att = f"model.layers.{i}", f"layers.{i}", f"model.layers.{i}.attn"
        _take_norm(builder, f"{target}.mixer_norm", f"{source}.attn_norm")
        _take_norm(builder, f"{target}.feed_norm", f"{source}.ffn_norm")
        for row, (name, letter) in enumerate(MIXTURES.items()):
            into, old = f"{target}.mixer.shift_{name}", f"{att}.x_x"
            if old in builder.shapes:
                piece = Piece(old, (len(MIXTURES), c.hidden_size), rows=(row, row + 1), take=_first)
                builder.pieces[into] = [piece]
            else:
                _vector(builder, into, f"{att}.x_{letter}", c.hidden_size)
        for name, letter, rank, size in _low_ranks(c, i):
            into, lora = f"{target}.mixer.{name}", f"{att}.{letter}_lora.lora"
            builder.copy(f"{into}.down.weight", f"{lora}.0.weight", (rank, c.hidden_size))
            builder.copy(f"{into}.up.weight", f"{lora}.2.weight", (size, rank))
            if name != "gate":
                builder.copy(f"{into}.offset", f"{lora}.2.bias", (size,))
        names = {"q_proj": "r_proj", "k_proj": "k_proj", "v_proj": "v_proj", "out_proj": "o_proj"}
        _take_shared(builder, i, att, f"{source}.ffn", names, "g_norm")


def _take_ends(builder: PlanBuilder, embed: str, first: str, last: str, head: str) -> None:
    """Take the embedding, its norm, the last norm and the head."""
    c = builder.config
    builder.copy("embed.weight", embed, (c.vocab_size, c.hidden_size))
    if c.embedding_norm:
        _take_norm(builder, "embed.norm", first)
    _take_norm(builder, "norm", last)
    if not c.tie_embeddings:
        builder.copy("head.weight", head, (c.vocab_size, c.hidden_size))
    elif {embed, head} <= builder.shapes.keys():
        builder.equal.append((embed, head))


def _take_norm(builder: PlanBuilder, target: str, source: str) -> None:
    for name in ("weight", "bias"):
        builder.copy(f"{target}.{name}", f"{source}.{name}", (builder.config.hidden_size,))


def _take_shared(
    builder: PlanBuilder, layer: int, att: str, ffn: str, names: Mapping[str, str], norm: str
) -> None:  # fmt: skip
    """Take the tensors whose layouts differ in names alone; names: of the matrices here and there."""
    c, target = builder.config, f"layers.{layer}"
    keys, values = _widths(c)
    shapes = {"q_proj": (keys, c.hidden_size), "k_proj": (keys, c.hidden_size), "v_proj": (values, c.hidden_size)}
    for name, source in names.items():
        shape = shapes.get(name, (c.hidden_size, values))
        builder.copy(f"{target}.mixer.{name}.weight", f"{att}.{source}.weight", shape)
    for name, source in {"erase_scale": "k_k", "rate_scale": "k_a"}.items():
        _vector(builder, f"{target}.mixer.{name}", f"{att}.{source}", keys)
    assert c.rwkv is not None and c.feed is not None
    builder.copy(f"{target}.mixer.bonus", f"{att}.r_k", (c.rwkv.heads, c.rwkv.head_dim))
    for name in ("weight", "bias"):
        builder.copy(f"{target}.mixer.norm.{name}", f"{att}.{norm}.{name}", (values,))
    _vector(builder, f"{target}.feed.shift", f"{ffn}.x_k", c.hidden_size)
    builder.copy(f"{target}.feed.up_proj.weight", f"{ffn}.key.weight", (c.feed.size, c.hidden_size))
    builder.copy(f"{target}.feed.down_proj.weight", f"{ffn}.value.weight", (c.hidden_size, c.feed.size))


def _vector(builder: PlanBuilder, target: str, source: str, size: int) -> None:
    """Take a vector, which may have dimensions of 1 before its channels."""
    builder.copy(target, source, (size,), (1, size), (1, 1, size))


def _widths(c: HybridConfig) -> tuple[int, int]:
    """Return the channels of the keys and of the values of all heads."""
    assert c.rwkv is not None
    keys = c.rwkv.heads * c.rwkv.head_dim
    return keys, keys if c.rwkv.value_dim is None else c.rwkv.heads * c.rwkv.value_dim


def _low_ranks(c: HybridConfig, layer: int) -> list[tuple[str, str, int, int]]:
    """Return name, letter, rank and output channels of a layer's projections of low rank."""
    part, (keys, values) = c.part_of(layer), _widths(c)
    ranks = {"decay": part.decay_rank, "rate": part.rate_rank, "value_mix": part.value_rank, "gate": part.gate_rank}
    sizes = {"decay": keys, "rate": keys, "value_mix": values, "gate": values}
    return [(name, letter, ranks[name], sizes[name]) for name, letter in LOW_RANK.items() if ranks[name]]


def _first(rows: Tensor) -> Tensor:
    return rows[0]


FAMILY = CheckpointFamily(("rwkv7",), config_from, plan, r"\.attn?\.r_k$", complete=complete)
