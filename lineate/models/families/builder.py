"""Builds a loading plan from the names and shapes of a checkpoint, with the parts that several families share."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from lineate.models.config import HybridConfig
from lineate.models.files.loading import LoadingPlan, Piece
from lineate.models.files.safetensors import CheckpointError

Shape = tuple[int, ...]
IGNORED = (r"^(model\.)?mtp\.", r"^(model\.)?visual\.", r"rotary_emb\.inv_freq$")
"""Tensors that are left out if the plan does not take them: multi-token prediction, vision, rotary tables."""
FEW_EXPERTS = 1024
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")


class Part(NamedTuple):
    """Rows of a tensor in the checkpoint."""

    source: str
    shape: Shape
    rows: tuple[int, int] | None = None
    """First and last + 1 row; None means all rows."""
    turned: bool = False
    """Whether the checkpoint has the transpose, a matrix (in, out); shape and rows are those of (out, in)."""


def interleaved(source: str, heads: int, widths: Sequence[int], tail: Shape, turned: bool = False) -> list[Part]:
    """Return the parts, in lineate's order, of a tensor whose rows are grouped by head.

    In the checkpoint every head has the rows of q, then of k, and so on; in lineate q of all heads comes first, then k
    of all heads.

    Args:
        source: the tensor's name in the checkpoint.
        heads: the number of heads.
        widths: rows of q, k, ... of one head.
        tail: the shape of a row.
        turned: whether the checkpoint has the transpose.
    """
    group = sum(widths)
    return [
        Part(source, (heads * group, *tail), (h * group + last - width, h * group + last), turned)
        for width, last in zip(widths, accumulate(widths), strict=True)
        for h in range(heads)
    ]


class PlanBuilder:
    """Collects the pieces of a plan for a checkpoint whose tensors have these shapes."""

    def __init__(self, config: HybridConfig, shapes: Mapping[str, Shape]) -> None:
        self.config = config
        self.shapes = shapes
        self.prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in shapes), "model.")
        self.pieces: dict[str, list[Piece]] = {}
        self.equal: list[tuple[str, str]] = []

    def plan(self) -> LoadingPlan:
        return LoadingPlan(self.pieces, IGNORED, tuple(self.equal))

    def first(self, *names: str) -> str:
        """Return the first of these names that the checkpoint has, or the first name if it has none of them."""
        return next((name for name in names if name in self.shapes), names[0])

    def shape(self, source: str, *allowed: Shape) -> Shape:
        """Return the source's shape if it is one of these, else the first, which errors report as the expected one."""
        found = self.shapes.get(source, allowed[0])
        return found if found in allowed else allowed[0]

    def copy(self, target: str, source: str, *allowed: Shape) -> None:
        """Take the whole of a tensor, in one of these shapes, row-major."""
        self.pieces[target] = [Piece(source, self.shape(source, *allowed))]

    def stack(self, target: str, parts: Sequence[Part]) -> None:
        """Take rows of several tensors, one below the other."""
        self.pieces[target] = pieces = []
        row = 0
        for (source, shape, turned), group in groupby(parts, lambda part: (part.source, part.shape, part.turned)):
            start = row
            spans = []
            for part in group:
                first, last = part.rows or (0, shape[0])
                spans.append((first, last))
                if not turned:
                    pieces.append(Piece(source, shape, (slice(row, row + last - first),), part.rows))
                row += last - first
            if turned:  # one piece, so that the source is read once
                take = partial(_columns, spans=spans)
                pieces.append(Piece(source, shape[::-1], (slice(start, row),), take=take))

    def ends(self, *names: str) -> None:
        """Take the embedding, norm or final_layernorm, and lm_head.

        names: names of the embedding other than embed_tokens; the prefix is that of the first existing name.
        """
        known = [(p, name) for name in (*names, "embed_tokens") for p in PREFIXES]
        there = [(p, name) for p, name in known if f"{p}{name}.weight" in self.shapes]
        self.prefix, name = there[0] if there else ("model.", known[0][1])
        c, prefix = self.config, self.prefix
        embed = f"{prefix}{name}.weight"
        self.copy("embed.weight", embed, (c.vocab_size, c.hidden_size))
        self.copy(
            "norm.weight", self.first(f"{prefix}norm.weight", f"{prefix}final_layernorm.weight"), (c.hidden_size,)
        )
        head = self.first("lm_head.weight", f"{prefix}lm_head.weight", "language_model.lm_head.weight")
        if not c.tie_embeddings:
            self.copy("head.weight", head, (c.vocab_size, c.hidden_size))
        elif head in self.shapes and embed in self.shapes:
            self.equal.append((embed, head))

    def norms(self, layer: int, mixer: str, feed: str) -> None:
        """Take the two norms of a block, which have these names."""
        self.copy(f"layers.{layer}.mixer_norm.weight", mixer, (self.config.hidden_size,))
        self.copy(f"layers.{layer}.feed_norm.weight", feed, (self.config.hidden_size,))

    def delta(self, layer: int, source: str, gates: str, norm: str, out: str) -> None:
        """Take the tensors of all linear layers: A_log, dt_bias from `gates`; the norm and the output from `source`."""
        linear = self.config.linear
        assert linear is not None
        hv, target = linear.value_heads, f"layers.{layer}.mixer"
        self.copy(f"{target}.A_log", f"{gates}.A_log", (hv,), (1, 1, hv, 1))
        k = linear.key_dim
        widths: list[Shape] = [(hv * k,), (hv, k)] if self.config.letters[layer] == "K" else [(hv,)]
        self.copy(f"{target}.dt_bias", f"{gates}.dt_bias", *widths)
        self.copy(f"{target}.norm.weight", f"{source}.{norm}.weight", (linear.value_dim,))
        self.copy(
            f"{target}.out_proj.weight", f"{source}.{out}.weight", (self.config.hidden_size, hv * linear.value_dim)
        )

    def convolution(self, layer: int, source: str) -> None:
        """Take the convolution over q | k | v.

        It is one tensor, conv1d, or three: q_conv1d, k_conv1d and v_conv1d. Only the sum of the three sizes must fit;
        they need not be cut between q, k and v.
        """
        linear = self.config.linear
        assert linear is not None
        keys, values, size = linear.heads * linear.key_dim, linear.value_heads * linear.value_dim, linear.conv_size
        n = linear.writes if self.config.letters[layer] == "U" else 1
        target, whole = f"layers.{layer}.mixer.conv.weight", f"{source}.conv1d.weight"
        three = [f"{source}.{part}_conv1d.weight" for part in "qkv"]
        if whole in self.shapes or not any(name in self.shapes for name in three):
            channels = (1 + n) * keys + n * values
            self.copy(target, whole, (channels, 1, size), (channels, size))
            return
        wanted = [(keys, 1, size), (n * keys, 1, size), (n * values, 1, size)]
        shapes = [self.shapes.get(name, shape) for name, shape in zip(three, wanted, strict=True)]
        fits = sum(shape[0] for shape in shapes) == (1 + n) * keys + n * values
        if not (fits and all(shape[1:] in ((1, size), (size,)) for shape in shapes)):
            shapes = [self.shape(name, shape, (shape[0], size)) for name, shape in zip(three, wanted, strict=True)]
        self.stack(target, [Part(name, shape) for name, shape in zip(three, shapes, strict=True)])

    def attention(self, layer: int, source: str) -> None:
        """Take q_proj (with the gate, head by head), k_proj, v_proj, their norms if there are any, o_proj."""
        c, attention = self.config, self.config.attention
        assert attention is not None
        heads, kv, dim, target = attention.heads, attention.kv_heads, attention.head_dim, f"layers.{layer}.mixer"
        rows = (2 if attention.gated else 1) * heads * dim
        for kind, tail in (("weight", (c.hidden_size,)), ("bias", ())):
            if kind == "bias" and not attention.bias:
                continue
            q, shape = f"{source}.q_proj.{kind}", (rows, *tail)
            parts = [Part(q, shape)]
            if attention.gated:  # on disk: q, gate of the first head, q, gate of the second, ...
                parts = interleaved(q, heads, (dim, dim), tail)
            parts += [Part(f"{source}.{name}_proj.{kind}", (kv * dim, *tail)) for name in "kv"]
            self.stack(f"{target}.in_proj.{kind}", parts)
        self.copy(f"{target}.out_proj.weight", f"{source}.o_proj.weight", (c.hidden_size, heads * dim))
        if attention.bias:
            self.copy(f"{target}.out_proj.bias", f"{source}.o_proj.bias", (c.hidden_size,))
        for name, count in (("q", heads), ("k", kv)) if attention.qk_norm is not None else ():
            width = dim if attention.qk_norm == "head" else count * dim
            self.copy(f"{target}.{name}_norm.weight", f"{source}.{name}_norm.weight", (width,))

    def dense(self, target: str, source: str, size: int) -> None:
        """Take gate_proj, up_proj and down_proj."""
        hidden = self.config.hidden_size
        parts = [Part(f"{source}.{name}_proj.weight", (size, hidden)) for name in ("gate", "up")]
        self.stack(f"{target}.gate_up_proj.weight", parts)
        self.copy(f"{target}.down_proj.weight", f"{source}.down_proj.weight", (hidden, size))

    def experts(self, layer: int, source: str, names: Sequence[tuple[str, str, str]]) -> None:
        """Take the experts in one tensor, or one by one; names: possible names of one expert's gate, up and down."""
        experts, hidden, target = self.config.experts, self.config.hidden_size, f"layers.{layer}.feed"
        assert experts is not None
        fused = f"{source}.experts.gate_up_proj", f"{source}.experts.down_proj"
        if any(name in self.shapes for name in fused):
            self._fused_experts(target, *fused)
            return
        if experts.count > max(FEW_EXPERTS, len(self.shapes)):  # fewer are told by name
            raise CheckpointError(
                f"the config's experts one by one need at least {experts.count} tensors, got {len(self.shapes)}"
            )
        known = [each for each in names if f"{source}.experts.0.{each[0]}.weight" in self.shapes]
        gate, up, down = (known or list(names))[0]
        sizes, into, back = experts.size, [], []
        for e in range(experts.count):
            one = f"{source}.experts.{e}"
            into.append(Piece(f"{one}.{gate}.weight", (sizes, hidden), (e, slice(0, sizes))))
            into.append(Piece(f"{one}.{up}.weight", (sizes, hidden), (e, slice(sizes, 2 * sizes))))
            back.append(Piece(f"{one}.{down}.weight", (hidden, sizes), (e,)))
        self.pieces[f"{target}.experts_gate_up"], self.pieces[f"{target}.experts_down"] = into, back

    def _fused_experts(self, target: str, gate_up: str, down: str) -> None:
        """Take all experts from two tensors, which are both in lineate's layout or both transposed.

        A tensor whose shape fits both layouts is read like the other one; if neither decides, both are in lineate's
        layout.
        """
        experts, hidden = self.config.experts, self.config.hidden_size
        assert experts is not None
        ours: dict[str, Shape] = {
            gate_up: (experts.count, 2 * experts.size, hidden),
            down: (experts.count, hidden, experts.size),
        }
        votes = {
            name: self.shapes[name] == shape
            for name, shape in ours.items()
            if name in self.shapes and sorted(self.shapes[name]) == sorted(shape) and shape[1] != shape[2]
        }
        if len(set(votes.values())) > 1:
            raise CheckpointError(
                f"{gate_up} and {down} must both be (experts, out, in) = {ours[gate_up]}, {ours[down]} or both "
                f"transposed, got {self.shapes[gate_up]} and {self.shapes[down]}"
            )
        straight = all(votes.values())
        for key, name in (("experts_gate_up", gate_up), ("experts_down", down)):
            count, out, given = ours[name]
            if straight:
                self.copy(f"{target}.{key}", name, ours[name])
            else:
                self.pieces[f"{target}.{key}"] = [
                    Piece(name, (count, given, out), (slice(e, e + 1),), (e, e + 1), _transposed) for e in range(count)
                ]


def _transposed(block: Tensor) -> Tensor:
    return block.transpose(1, 2)


def _columns(block: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
    """Return these columns of a matrix as rows."""
    rows = [block[:, first:last].t() for first, last in spans]
    return rows[0] if len(rows) == 1 else torch.cat(rows)
