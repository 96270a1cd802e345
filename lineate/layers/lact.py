"""The LaCT mixer: a SwiGLU network per head that learns large chunks, next to softmax attention over a window."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate.forms.sequences import sequence_lengths
from lineate.layers.configs import MemoryConfig
from lineate.layers.costs.learning import LactCosts, learning_kept
from lineate.layers.gpu import kernels_for
from lineate.layers.learning import LearningMixer, divide_memory, rows_of, shared_sizes
from lineate.layers.norm import RMSNorm
from lineate.layers.registry import Look, MixerKind, ModelSizes, register
from lineate.layers.rope import rotate, turns
from lineate.layers.softmax import attend_new, takes_packed
from lineate.layers.state import Memory, TensorSpec, token_positions
from lineate.memory.lact import fresh_state, lact
from lineate.native.low_precision_matmul import attention
from lineate.parallel.tensor.shards import Cut, Part, Shard
from lineate.rule import compute_dtype, normalize
from lineate.torch_ops.elementwise import elementwise

_BLOCK = 512  # queries that share one mask


class LaCT(LearningMixer):
    """y = out_proj(window attention(q, k, v) + RMSNorm(f(q')) silu(s)), f learned from k', v' chunk by chunk.

    in_proj is q | k | v | rates of W0, W1, W2 | momentum | s, the last five per head. q', k' = silu(scale * (q, k) +
    offset) of norm 1 per head, v' = silu(v); f(x) = W1 (silu(W0 x) * W2 x) has expansion * head_dim channels. f has
    learned only from earlier, complete chunks; only the attention sees the tokens of the current chunk. So the window
    is by default as long as the chunk, which leaves no gap. rates = softplus(a + inverse of base_rate). The weights
    that every sequence begins with are learned.
    """

    beside = ("conv", "keys", "values", "seen")

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        head_dim: int | None = None,
        expansion: float = 1.0,
        chunk: int = 2048,
        window: int | None = None,
        attention_heads: int | None = None,
        rope_theta: float = 1e6,
        base_rate: float = 1e-3,
        muon: bool = True,
        conv_size: int = 0,
        norm_eps: float = 1e-6,
    ) -> None:
        """Make the mixer.

        Args:
            hidden_size: Channels of x.
            heads: Heads, each with a network of its own.
            head_dim: Channels of a head; None is hidden_size / heads.
            expansion: Hidden channels of the network over head_dim.
            chunk: Tokens that are written together.
            window: Tokens that the attention sees; None is the chunk, 0: no attention.
            attention_heads: Heads of the attention; None: of 64 channels each, if that is possible.
            rope_theta: The base of the attention's rotary positions.
            base_rate: The step size at first, before Muon.
            muon: Whether the step is orthogonalised.
            conv_size: Tokens that the short convolution sees; 0 means no convolution.
            norm_eps: Added to the mean square in the output norm.
        """
        head_dim = hidden_size // heads if head_dim is None else head_dim
        width, inner = heads * head_dim, int(expansion * head_dim)
        if attention_heads is None:
            attention_heads = _attention_heads(heads, width)
        if width % attention_heads or width // attention_heads % 2:
            raise ValueError(
                f"attention_heads must divide heads * head_dim = {width} into even parts, got {attention_heads}"
            )
        if window is not None and window < 0:
            raise ValueError(f"window must be at least 0, got {window}; 0 leaves the attention out")
        splits = (3 * width, 5 * heads)  # q k v; rates of W0, W1, W2, momentum, s
        super().__init__(hidden_size, heads, splits=splits, chunk=chunk, conv_size=conv_size, norm_eps=norm_eps)
        self.head_dim, self.expansion, self.attention_heads = head_dim, expansion, attention_heads
        self.window, self.muon, self.rope_theta = chunk if window is None else window, muon, rope_theta
        self.base = base_rate + math.log(-math.expm1(-base_rate))  # softplus of it is base_rate
        self.gate_bias = nn.Parameter(torch.zeros(5, heads, dtype=torch.float32))
        self.scale = nn.Parameter(torch.ones(2, width))
        """Scales q and k before f."""
        self.offset = nn.Parameter(torch.zeros(2, width))
        shapes = (inner, head_dim), (head_dim, inner), (inner, head_dim)
        self.initial = nn.ParameterList([torch.empty(heads, *shape, dtype=torch.float32) for shape in shapes])
        self.norm = RMSNorm(head_dim, norm_eps)
        self.finish(width)

    def reset_parameters(self) -> None:
        """Initialise W0, W1, W2 so that they preserve the scale of their inputs."""
        for x in self.initial:
            nn.init.normal_(x, std=x.shape[2] ** -0.5)
        for x in (self.gate_bias, self.offset):
            nn.init.zeros_(x)
        nn.init.ones_(self.scale)

    def memory_spec(self, dtype: torch.dtype, wide: torch.dtype) -> list[TensorSpec]:
        """Return the specs of the window, the network, its sums, last change, norms and position in the chunk."""
        specs = []
        if self.window:
            shape = (self.window - 1, self.attention_heads, self.heads * self.head_dim // self.attention_heads)
            specs += [TensorSpec(name, shape, dtype) for name in ("keys", "values")]
            specs.append(TensorSpec("seen", (), torch.int64))
        for i, x in enumerate(self.initial):
            specs += [TensorSpec(f"{name}_{i}", tuple(x.shape), wide) for name in ("weights", "sums", "previous")]
            specs.append(TensorSpec(f"norms_{i}", (*x.shape[:2], 1), wide))
        return [*specs, TensorSpec("momentum", (self.heads,), wide), TensorSpec("position", (), torch.int64)]

    def learn(
        self, x: Tensor, mixed: Tensor, gates: list[Tensor], state: Memory | None, cu_seqlens: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the attention's output + RMSNorm(f) silu(s), the window's keys and values, and the network."""
        q, k, v = mixed.chunk(3, -1)
        dtype = compute_dtype(x.dtype)
        logits = gates[0].to(dtype).unflatten(-1, (5, self.heads)) + self.gate_bias.to(dtype)
        rates, momentum, shown = logits.split((3, 1, 1), 2)
        rates = elementwise(F.softplus, rates + self.base).transpose(2, 3)
        tensors: dict[str, Tensor] = {}
        if self.window:
            attended = self.attend_window(q, k, v, state, cu_seqlens, tensors)
        if state is None:
            before = fresh_state([weights.to(dtype) for weights in self.initial], rows_of(x, cu_seqlens))
        else:
            before = self.memory_of(state)
        y, after = lact(
            *self._features(mixed), rates, elementwise(torch.sigmoid, momentum.squeeze(2)), before,
            chunk=self.chunk, muon=self.muon, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        y = self.norm(y) * elementwise(F.silu, shown.transpose(2, 3)).to(y.dtype)
        y = y.flatten(2)
        return y + attended if self.window else y, tensors | after

    def _features(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q', k', v' `b t heads d` of q | k | v."""
        if kernels_for(mixed, self.scale, self.offset) is not None:
            from lineate.kernels.memories.lact_features import features

            return features(mixed, self.scale, self.offset, self.heads)
        q, k, v = mixed.chunk(3, -1)
        dtype = compute_dtype(mixed.dtype)
        q, k = (
            normalize(
                elementwise(F.silu, x * a.to(x.dtype) + b.to(x.dtype)).unflatten(-1, (self.heads, -1)).to(dtype)
            ).to(x.dtype)
            for x, a, b in zip((q, k), self.scale, self.offset, strict=True)
        )
        return q, k, elementwise(F.silu, v).unflatten(-1, (self.heads, -1))

    def attend_window(
        self, q: Tensor, k: Tensor, v: Tensor, state: Memory | None, cu_seqlens: Tensor | None, new: dict[str, Tensor]
    ) -> Tensor:
        """Attend over the window; q, k, v `b t width`. Puts its state into `new`."""
        q, k, v = (y.unflatten(-1, (self.attention_heads, -1)) for y in (q, k, v))
        seen = 0 if state is None else state["seen"]
        positions = token_positions(seen, q, cu_seqlens)
        turn = turns(positions, q.shape[-1], self.rope_theta, q.dtype)
        q, k = rotate(q, turn), rotate(k, turn)
        past = None if state is None else (state["keys"], state["values"], state["seen"])
        if past is None and q.shape[1] and takes_packed(q):
            y = attend_new(q, k, v, q.shape[3] ** -0.5, cu_seqlens, window=self.window)
            n = self.window - 1
            new["keys"], new["values"] = (
                last_of_rows(x, n) if cu_seqlens is None else last_tokens(x[0], n, cu_seqlens) for x in (k, v)
            )
        elif cu_seqlens is None:
            y, new["keys"], new["values"] = window_attention(q, k, v, self.window, past)
        else:
            found = []
            for row, own in enumerate(zip(*(x.split(sequence_lengths(cu_seqlens), 1) for x in (q, k, v)), strict=True)):
                own_past = None if past is None else (past[0][row, None], past[1][row, None], past[2][row, None])
                found.append(window_attention(own[0], own[1], own[2], self.window, own_past))
            y = torch.cat([own[0] for own in found], 1)
            new["keys"], new["values"] = (torch.cat([own[i] for own in found]) for i in (1, 2))
        if cu_seqlens is None:
            read = torch.full((q.shape[0],), q.shape[1], device=q.device)
        else:
            read = cu_seqlens.diff().long()
        new["seen"] = read if state is None else read + seen
        return y.flatten(2)

    def cuts(self) -> dict[str, Cut]:
        """Return the division of the parameters among ranks, by heads."""
        channels, heads = Part(self.heads * self.head_dim, self.heads), Part(self.heads, self.heads)
        cuts = self.shared_cuts((channels,) * 3, (heads,) * 5)
        cuts |= {f"initial.{i}": Cut(0, (heads,)) for i in range(len(self.initial))}
        return cuts | {"gate_bias": Cut(1, (heads,)), "scale": Cut(1, (channels,)), "offset": Cut(1, (channels,))}

    def extra_repr(self) -> str:
        return f"chunk={self.chunk}, window={self.window}, attention_heads={self.attention_heads}"


def _attention_heads(heads: int, width: int) -> int:
    """Return the heads of the window's attention: of 64 channels each, if that is possible."""
    return heads if width % 64 else max(width // 64, 1)


def _make(model: ModelSizes, memory: MemoryConfig) -> nn.Module:
    return LaCT(**shared_sizes(model, memory), head_dim=memory.head_dim, window=memory.window)


def _divide(memory: MemoryConfig, ranks: int) -> MemoryConfig:
    """Return the sizes of one rank's share; heads of the window's attention must not be cut."""
    divided = divide_memory(memory, ranks)
    whole, own = (_attention_heads(x.heads, x.heads * x.head_dim) for x in (memory, divided))
    if memory.window != 0 and whole != own * ranks:
        size = memory.heads * memory.head_dim // whole
        raise ValueError(f"tensor must not cut the {whole} heads of {size} channels of LaCT's attention, got {ranks}")
    return divided


COSTS = LactCosts(chunk=2048, gates=5, gated=False)
"""What LaCT costs."""
KIND = register(
    MixerKind(
        letter="C",
        name="lact",
        label="LaCT",
        config=MemoryConfig,
        section="memory",
        make=_make,
        operations=COSTS.operations(),
        kept_bytes=learning_kept(_make),
        look=Look("#AA4499", ">", (0, (3, 1, 1, 3))),
        shard=Shard(_divide, LaCT.cuts),
    )
)


def last_tokens(x: Tensor, n: int, bounds: Tensor) -> Tensor:
    """Return the last n tokens of each packed sequence, x `t ...` -> `n_seqs n ...`, zeros in front of shorter ones."""
    at = bounds[1:, None] + torch.arange(-n, 0, device=x.device)  # n_seqs n
    inside = (at >= bounds[:-1, None]).view(*at.shape, *(1,) * (x.dim() - 1))
    return x[at.clamp_min(0)].where(inside, 0)


def last_of_rows(x: Tensor, n: int) -> Tensor:
    """Return the last n tokens of each row, x `b t heads d` -> `b n heads d`, zeros in front of shorter ones."""
    if x.shape[1] < n:
        x = F.pad(x, (0, 0, 0, 0, n - x.shape[1], 0))
    return x[:, x.shape[1] - n :].clone(memory_format=torch.contiguous_format)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int, past: tuple[Tensor, Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return softmax attention of each token over itself and the window - 1 before, and the last keys and values.

    Args:
        q: Queries `b t heads d`.
        k: Keys `b t heads d`.
        v: Values `b t heads d`.
        window: Tokens that each token sees.
        past: The last window - 1 keys and values `b window-1 heads d`, zeros where there were none, and how many tokens
            were seen, `b`; None: none.
    """
    if q.is_cuda:  # torch's kernels misread rows whose distance is not a multiple of 16 bytes
        q, k, v = (x.clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    t, first, before = q.shape[1], None, 0
    if past is not None:
        k, v = torch.cat((past[0].to(k.dtype), k), 1), torch.cat((past[1].to(v.dtype), v), 1)
        before = window - 1
        first = (before - past[2]).clamp_min(0)[:, None, None, None]  # the first key that exists
    outputs = []
    for start in range(0, t, _BLOCK):
        stop = min(start + _BLOCK, t)
        low, high = max(before + start - window + 1, 0), before + stop
        row = torch.arange(before + start, high, device=q.device)[:, None]
        column = torch.arange(low, high, device=q.device)
        mask = (column <= row) & (column > row - window)
        if first is not None:
            mask = mask & (column >= first)  # b 1 t n
        own = (q[:, start:stop], k[:, low:high], v[:, low:high])
        own_q, own_k, own_v = (x.transpose(1, 2) for x in own)
        y = attention(own_q, own_k, own_v, mask)
        outputs.append(y.transpose(1, 2))
    keys, values = (last_of_rows(x, window - 1) for x in (k, v))
    return torch.cat(outputs, 1) if outputs else torch.empty_like(q), keys, values
