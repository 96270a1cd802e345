"""Latent attention (MLA): the cache has one vector a token, from which every head makes its key and value.

    c = RMSNorm(W_c x)    key of head h: (W_kh c, p)    value: W_vh c    p: a few channels that all heads share

Decoding instead multiplies q by W_kh^T and the output by W_vh. That gives the same result with the cached vector itself
as the only key and value.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lineate import checks
from lineate.layers import invariant
from lineate.layers.attention import LOOK
from lineate.layers.configs import LatentConfig
from lineate.layers.costs.attention import LATENT, latent_kept
from lineate.layers.entry import check_call
from lineate.layers.norm import RMSNorm
from lineate.layers.projection import project, runs_own_forward
from lineate.layers.registry import MixerKind, ModelSizes, register
from lineate.layers.rope import rotate, turns
from lineate.layers.softmax import (
    attend,
    attend_blocks,
    attend_long,
    attend_new,
    lengths_of,
    runs_kernels,
    takes_square,
)  # fmt: skip
from lineate.layers.split_attention import attend_segment
from lineate.layers.state import TensorSpec, TokenCache, token_positions
from lineate.native.low_precision_matmul import multiply_heads
from lineate.parallel.context.segments import Bounds, Context, segment_of
from lineate.parallel.tensor.shards import Cut, Part, Shard, linear_cuts, share_out
from lineate.torch_ops.elementwise import elementwise

if TYPE_CHECKING:
    from lineate.kernels.layers.pieces import Block

EXPANDED = 8192
"""How many entries of all rows are expanded at a time for a piece of a prompt, where our kernels run."""
SMALLEST_BLOCK = 256
MOST_ABSORBED = 64
"""The most tokens that read the cache itself on a GPU: torch's kernels keep all scores of such wide heads."""


class LatentAttention(nn.Module):
    """Causal softmax attention whose keys and values are made from one latent vector a token.

    in_proj is q | latent | shared | gate, one projection; a query head has nope_dim + rope_dim channels. With a gate
    the output is multiplied by sigmoid(gate) before out_proj.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        heads: heads of queries, keys and values.
        rank: channels of the latent vector.
        nope_dim: channels of a key that come from the latent vector.
        rope_dim: channels of a key that all heads share.
        value_dim: channels of a value.
        rope_theta: base of the rotation of the shared channels and their part of q; None: no positions (Kimi Linear).
        norm_eps: epsilon of the latent vector's norm.
        gate: the output's sigmoid gate: one a "head" (Ling), one a "channel", or None.
    """

    context: Context | None = None
    """If set, x is this rank's segment of sequences that are split over ranks (docs/scaling.md)."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        rope_theta: float | None = None,
        norm_eps: float = 1e-6,
        gate: str | None = None,
    ) -> None:
        super().__init__()
        checks.check_choice("gate", str(gate), ("head", "channel", "None"))
        self.heads, self.rank, self.nope_dim, self.rope_dim, self.value_dim = (
            heads, rank, nope_dim, rope_dim, value_dim,
        )  # fmt: skip
        self.rope_theta, self.gate = rope_theta, gate
        gate_width = LatentConfig(heads, rank, nope_dim, rope_dim, value_dim, gate=gate).gate_width
        self.scale = (nope_dim + rope_dim) ** -0.5
        self.splits = (heads * (nope_dim + rope_dim), rank, rope_dim, gate_width)
        self.in_proj = nn.Linear(hidden_size, sum(self.splits), bias=False)
        self.latent_norm = RMSNorm(rank, norm_eps)
        self.up_proj = nn.Linear(rank, heads * (nope_dim + value_dim), bias=False)
        self.out_proj = nn.Linear(heads * value_dim, hidden_size, bias=False)

    @property
    def state_spec(self) -> tuple[TensorSpec, ...]:
        return (TensorSpec("latent", ("t", 1, self.rank + self.rope_dim), self.in_proj.weight.dtype),)

    def forward(
        self, x: Tensor, state: TokenCache | None = None, cu_seqlens: Bounds = None
    ) -> tuple[Tensor, TokenCache]:
        """Mix the tokens of x `b t hidden`; the state is the latent vector and the shared channels of every token.

        Args:
            x: `b t hidden`; with cu_seqlens `1 t hidden`.
            state: what an earlier call returned, to continue its sequences; with None they begin here.
            cu_seqlens: where sequences packed into one row begin and end, `n_seqs + 1`.
        """
        check_call(self, x, state, cu_seqlens)
        past = 0 if state is None else state.lengths
        segment, cu_seqlens = segment_of(self.context, x, cu_seqlens, past)
        q, latent, shared, gate = project(self.in_proj, x).split(self.splits, -1)
        q = q.unflatten(-1, (self.heads, -1))  # b t heads nope+rope
        latent, shared = self.latent_norm(latent), shared[..., None, :]
        if self.rope_theta is not None:
            positions = token_positions(past if segment is None else segment.lengths(past), x, cu_seqlens)
            turn = turns(positions, self.rope_dim, self.rope_theta, x.dtype)
            q = torch.cat((q[..., : self.nope_dim], rotate(q[..., self.nope_dim :], turn)), -1)
            shared = rotate(shared, turn)
        new = {"latent": torch.cat((latent[..., None, :], shared), -1)}  # b t 1 rank+rope
        if segment is not None:
            output, state = attend_segment(segment, q, new, state, self._keys_and_values, attend_new, self.scale)
            return self._leave(output, gate), state
        if state is None:
            output = attend_new(q, *self._keys_and_values(new), self.scale, cu_seqlens)
            return self._leave(output, gate), TokenCache.of(new, cu_seqlens)
        state = state.append(new) if cu_seqlens is None else state.append_packed(new, cu_seqlens)
        return self._leave(self._read(q, state, cu_seqlens), gate), state

    def reads_own_length(self, t: int) -> bool:
        """Whether t new tokens of a row read only the entries that the row has; see softmax.reads_own_length."""
        from lineate.kernels.layers.latent import MOST_TOKENS, WIDEST_RANK, WIDEST_SHARED  # triton, at its first use

        return t <= MOST_TOKENS and self.rank <= WIDEST_RANK and self.rope_dim <= WIDEST_SHARED

    @property
    def absorbs(self) -> bool:
        """Whether calling up_proj only multiplies by its weight: without an adapter, a hook of its own or a bias."""
        up = self.up_proj
        return type(up) is nn.Linear and runs_own_forward(up) and up.bias is None

    def _read(self, q: Tensor, state: TokenCache, cu_seqlens: Tensor | None) -> Tensor:
        """Attend with q `b t heads nope+rope` to the cache, which has its tokens; return `b t heads value`.

        Reading the cache itself costs rank + rank a pair instead of nope + value, but expands nothing. On a GPU a few
        tokens do so; a piece of a prompt reads keys and values that are made from one block of the cache at a time.
        """
        cached, t, absorbs = state["latent"], q.shape[1], self.absorbs
        if runs_kernels(q, cached, self.up_proj.weight):
            from lineate.kernels.layers.pieces import serves_piece  # triton, at its first use

            if cu_seqlens is None and absorbs and self.reads_own_length(t):
                return self.absorbed(*self._parts(q), state, None)
            if cu_seqlens is None and isinstance(state.lengths, int) and takes_square(q, cached, self.value_dim):
                return attend_long(q, lambda begin, end: self._expand(cached[:, begin:end]), state.lengths, self.scale)
            if serves_piece(q, cached, self.nope_dim, self.value_dim, self.rope_dim):
                return attend_blocks(q, self._blocks(cached), state, self.scale, cu_seqlens)
        few = 4 * t < state.n and (t <= MOST_ABSORBED or not q.is_cuda)
        if absorbs and (t == 1 or few):
            return self.absorbed(*self._parts(q), state, cu_seqlens)
        return self._expanded(q, state, cu_seqlens)

    def _leave(self, output: Tensor, gate: Tensor) -> Tensor:
        return project(self.out_proj, self.opened(output, gate))

    def opened(self, output: Tensor, gate: Tensor) -> Tensor:
        """Return the output `b t heads v`, multiplied by its gate if there is one, as out_proj reads it."""
        if self.gate is not None:
            output = output * elementwise(torch.sigmoid, gate).unflatten(-1, (self.heads, -1))
        return output.flatten(2)

    def _parts(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Return the channels of queries that meet keys from the latent vector, and those that all heads share."""
        return q[..., : self.nope_dim], q[..., self.nope_dim :]

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks, by heads; the latent vector is whole on each."""
        queries, latent, shared, gate = self.splits
        parts = Part(queries, self.heads), Part(latent), Part(shared), Part(gate, self.heads)
        cuts = linear_cuts("in_proj", self.in_proj, 0, parts)
        cuts |= linear_cuts("up_proj", self.up_proj, 0, (Part(self.up_proj.out_features, self.heads),))
        return cuts | linear_cuts("out_proj", self.out_proj, 1, (Part(self.out_proj.in_features, self.heads),))

    def _keys_and_values(self, entries: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self._expand(entries["latent"])

    def _expand(self, cached: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all heads, from `rows n 1 rank+rope`."""
        made = project(self.up_proj, cached[:, :, 0, : self.rank]).unflatten(-1, (self.heads, -1))
        keys, values = made.split((self.nope_dim, self.value_dim), -1)
        shared = cached[..., self.rank :]
        if self.rope_dim and runs_kernels(keys, shared):
            from lineate.kernels.layers.around_attention import keys_of  # triton, at its first use

            return keys_of(keys, shared), values
        return torch.cat((keys, shared.expand(-1, -1, self.heads, -1)), -1), values

    def _expanded(self, q: Tensor, state: TokenCache, cu_seqlens: Tensor | None) -> Tensor:
        keys, values = self._expand(state["latent"])
        expanded = TokenCache({"keys": keys, "values": values}, state.lengths)
        return attend(q, expanded, "keys", "values", self.scale, cu_seqlens)

    def absorbed(self, q: Tensor, r: Tensor, state: TokenCache, cu_seqlens: Tensor | None) -> Tensor:
        """Attend with q `b t heads nope` and r `b t heads rope` to the cache itself; return `b t heads value`."""
        up = self.up_proj.weight.unflatten(0, (self.heads, -1))  # heads nope+value rank
        to_keys, to_values = up.split((self.nope_dim, self.value_dim), 1)
        multiply = invariant.multiply_heads if invariant.applies(q) else multiply_heads
        inside = multiply(q, to_keys)  # b t heads rank
        return multiply(self._read_entries(inside, r, state, cu_seqlens), to_values.mT)

    def _read_entries(self, q: Tensor, r: Tensor, state: TokenCache, cu_seqlens: Tensor | None) -> Tensor:
        """Attend with q `b t heads rank` and r `b t heads rope` to the cache itself; return `b t heads rank`."""
        cached = state["latent"]
        if cu_seqlens is None and runs_kernels(q, r, cached):
            from lineate.kernels.layers.latent import latent_attention, serves_latent  # triton, at its first use

            if serves_latent(q, r, cached):
                return latent_attention(q, r, cached, lengths_of(state, q.device), self.scale)
        return attend(torch.cat((q, r), -1), state, "latent", "latent", self.scale, cu_seqlens)[..., : self.rank]

    def _blocks(self, cached: Tensor) -> "Iterator[Block]":
        """Yield the keys and values of one block of the cache `rows n 1 rank+rope` after another."""
        from lineate.kernels.layers.pieces import Block  # triton, at its first use

        size = max(SMALLEST_BLOCK, EXPANDED // cached.shape[0])
        for first in range(0, cached.shape[1], size):
            part = cached[:, first : first + size]
            made = project(self.up_proj, part[:, :, 0, : self.rank]).unflatten(-1, (self.heads, -1))
            keys, values = made.split((self.nope_dim, self.value_dim), -1)
            yield Block(keys, values, part[..., self.rank :] if self.rope_dim else None, first)


def _make(model: ModelSizes, config: LatentConfig) -> LatentAttention:
    return LatentAttention(
        model.hidden_size, config.heads, rank=config.rank, nope_dim=config.nope_dim, rope_dim=config.rope_dim,
        value_dim=config.value_dim, rope_theta=config.rope_theta, norm_eps=config.norm_eps, gate=config.gate,
    )  # fmt: skip


def _divide(x: LatentConfig, ranks: int) -> LatentConfig:
    """Return the sizes of one rank's share of the heads."""
    return replace(x, heads=share_out("the heads", x.heads, ranks))


LATENT_ATTENTION = register(
    MixerKind(
        letter="M",
        name="latent_attention",
        label="latent attention",
        short="mla",
        config=LatentConfig,
        section="latent",
        make=_make,
        operations=LATENT,
        kept_bytes=latent_kept,
        cache="latent",
        look=LOOK,  # drawn like softmax attention
        shard=Shard(_divide, LatentAttention.cuts),
    )
)
