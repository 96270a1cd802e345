"""Feed-forward layers: SwiGLU, squared ReLU, and a mixture of such experts."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lineate import checks
from lineate.layers import invariant
from lineate.layers.gpu import coded, kernel_weight, kernels_for, uncoded
from lineate.layers.norm import RMSNorm
from lineate.layers.projection import is_bare, project
from lineate.layers.rwkv.channel_mix import ChannelMix
from lineate.native import experts as experts_in_c
from lineate.native import layers as native
from lineate.native.low_precision_matmul import has_separate_rows, linear, matmul
from lineate.parallel.tensor.shards import Cut, Part
from lineate.quantised import QuantisedWeight
from lineate.quantised.product import are_rounded
from lineate.rule import compute_dtype
from lineate.torch_ops.elementwise import GRAIN, elementwise
from lineate.torch_ops.invariance import NotInvariant
from lineate.torch_ops.tracing import PLAIN_TENSORS, is_eager, is_virtual, needs_grad

if TYPE_CHECKING:
    from lineate.kernels.layers.quantised_products import Codes

GATHERED = 16
"""Up to this many pairs of token and expert, a GPU copies the weights of each: fewer launches than sorting."""
ALL_EXPERTS = 64
"""Up to this many tokens, a GPU without a grouped product for the dtype runs all experts, which needs no counts."""


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one projection.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        size: hidden channels.
    """

    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * size, bias=False)
        self.down_proj = nn.Linear(size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return project(self.down_proj, glu(project(self.gate_up_proj, x)))

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks, by hidden channels."""
        own = Part(self.down_proj.in_features, self.down_proj.in_features)
        return {"gate_up_proj.weight": Cut(0, (own, own)), "down_proj.weight": Cut(1, (own,))}


class SquaredReLU(nn.Module):
    """down(relu(up(x))^2), without a gate.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        size: hidden channels.
    """

    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return project(self.down_proj, squared_relu(project(self.up_proj, x)))

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks, by hidden channels."""
        own = Part(self.down_proj.in_features, self.down_proj.in_features)
        return {"up_proj.weight": Cut(0, (own,)), "down_proj.weight": Cut(1, (own,))}


def squared_relu(x: Tensor) -> Tensor:
    """Return relu(x)^2."""
    return F.relu(x).square()


KINDS = ("swiglu", "relu2")
"""The feed-forwards that experts may be, too: SwiGLU and SquaredReLU."""
DENSE_KINDS = (*KINDS, "channel_mix")
"""All dense feed-forwards; ChannelMix has a state."""


def make_feed(kind: str, hidden_size: int, size: int) -> nn.Module:
    """Make a dense feed-forward of one of the DENSE_KINDS."""
    makers = {"swiglu": SwiGLU, "relu2": SquaredReLU, "channel_mix": ChannelMix}
    return makers[kind](hidden_size, size)


def glu(x: Tensor) -> Tensor:
    """Return silu(gate) * up for x = gate | up."""
    if native.serves(x):
        return native.glu(x)
    if (kernels := kernels_for(x)) is not None:
        return kernels.glu(x)
    gate, up = x.chunk(2, -1)
    return elementwise(F.silu, gate) * up


class MixtureOfExperts(nn.Module):
    """sum_e weight_e expert_e(x) over the experts that the router chooses for each token, plus a shared expert.

    With softmax scores the weights are the largest of softmax(router(x)). With sigmoid scores the choice is made by
    sigmoid(router(x)) + router_bias, within the best active_groups of the groups of experts, and the weights leave the
    bias out.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        count: how many experts there are.
        active: experts that a token goes to.
        size: hidden channels of an expert.
        shared_size: hidden channels of the shared expert; 0: there is none.
        shared_gate: whether the shared expert is weighted by sigmoid(gate).
        scores: of the router, "softmax" or "sigmoid".
        renormalize: whether the weights of a token's experts sum to 1.
        scale: multiplies these weights.
        groups: groups of experts (sigmoid scores).
        active_groups: groups that a token's experts come from.
        kind: of the experts, "swiglu", or "relu2" without a gate; experts_gate_up then has the rows of up alone.
    """

    router_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        count: int,
        active: int,
        size: int,
        *,
        shared_size: int = 0,
        shared_gate: bool = False,
        scores: str = "softmax",
        renormalize: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        active_groups: int = 1,
        kind: str = "swiglu",
    ) -> None:
        super().__init__()
        checks.check_choice("scores", scores, ("softmax", "sigmoid"))
        checks.check_choice("kind", kind, KINDS)
        self.kind = kind
        self.count, self.active, self.scores, self.renormalize, self.scale = count, active, scores, renormalize, scale
        self.groups, self.active_groups = groups, active_groups
        self.router = nn.Linear(hidden_size, count, bias=False)
        self.register_buffer("router_bias", torch.empty(count) if scores == "sigmoid" else None)
        self.experts_gate_up = nn.Parameter(torch.empty(count, 2 * size if kind == "swiglu" else size, hidden_size))
        self.experts_down = nn.Parameter(torch.empty(count, hidden_size, size))
        self.shared = make_feed(kind, hidden_size, shared_size) if shared_size else None
        self.shared_gate = nn.Linear(hidden_size, 1, bias=False) if shared_gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for x in (self.experts_gate_up, self.experts_down):
            nn.init.uniform_(x, -(x.shape[-1] ** -0.5), x.shape[-1] ** -0.5)
        if self.router_bias is not None:
            nn.init.zeros_(self.router_bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        y = self._run_in_place(tokens) if tokens.is_cuda else None
        return (self.run_in_torch(tokens) if y is None else y).view_as(x)

    def add_to(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Return x + self(tokens) of x and tokens `n hidden` on a GPU, the sum in the last launch where kernels run."""
        y = self._run_in_place(tokens, x)
        return x + self.run_in_torch(tokens) if y is None else y

    def after(self, norm: RMSNorm, x: Tensor) -> Tensor | None:
        """Return x + self(norm(x)) of one row x `1 hidden` on a GPU, the norm in the first launch; None: not served."""
        return self._run_in_place(x, x, norm)

    def run_in_torch(self, tokens: Tensor) -> Tensor:
        """Return the layer's output for tokens `n hidden`, with gradients if they are wanted."""
        if invariant.applies(tokens):
            raise NotInvariant("experts that the kernels do not take")
        weights, chosen = self.route(tokens)
        y = self._mix(tokens, weights.to(tokens.dtype), chosen)
        if self.shared is not None:
            shared = self.shared(tokens)
            y = y + (shared if self.shared_gate is None else self._opened(tokens) * shared)
        return y

    @property
    def _runs_own_code(self) -> bool:
        """Whether no method is overridden, in a subclass or on this module, that kernels and C would skip."""
        return type(self) is MixtureOfExperts and _METHODS.isdisjoint(vars(self))

    def _run_in_place(
        self, tokens: Tensor, residual: Tensor | None = None, norm: RMSNorm | None = None
    ) -> Tensor | None:
        """Return the layer's output by kernels that read the weights in place; None if they do not take this call.

        residual: what is added to it. norm: of the tokens, one row.
        """
        kernels = kernels_for(tokens)
        if not self._runs_own_code or kernels is None or not is_eager(tokens):
            return None
        if torch.is_autocast_enabled("cuda") or (torch.is_grad_enabled() and needs_grad(tokens, *self.parameters())):
            return None
        projections = [x for x in (self.router, self.shared_gate) if x is not None]
        if not all(type(x) is nn.Linear and is_bare(x) and x.bias is None for x in projections):
            return None
        from lineate.kernels.layers import mixture, routing  # triton, at their first use

        gate_up, down = kernel_weight(self.experts_gate_up), kernel_weight(self.experts_down)
        own = self._shared_weights() if mixture.takes_shared(tokens, isinstance(gate_up, tuple)) else None
        made = mixture.Experts(gate_up, down, self.kind, own)
        how = routing.Routing(
            self.active, self.scores == "sigmoid", self.renormalize, self.scale, self.groups, self.active_groups
        )
        gate = None if self.shared_gate is None else self.shared_gate.weight
        router = mixture.Router(self.router.weight, self.router_bias, gate, how)
        if not mixture.serves(tokens, router, made):
            return None
        beside = self.shared is not None and own is None
        if norm is not None and (beside or tokens.shape[1] > kernels.WIDEST_NORM):
            return None
        shared = self.shared(tokens) if beside else None  # type: ignore[misc]
        around = None if norm is None else (norm.weight, norm.eps, norm.zero_centred)
        return mixture.mix(tokens, router, made, shared, residual, around)

    def _shared_weights(self) -> "tuple[Tensor | Codes, Tensor | Codes] | None":
        """Return the weights of a shared expert that is like the others, if calling it only multiplies."""
        if type(self.shared) is SwiGLU:
            enter = self.shared.gate_up_proj
        elif type(self.shared) is SquaredReLU:
            enter = self.shared.up_proj
        else:
            return None
        leave = self.shared.down_proj
        if not is_bare(self.shared) or not all(type(x) is nn.Linear and is_bare(x) for x in (enter, leave)):
            return None
        pairs = (enter, self.experts_gate_up), (leave, self.experts_down)
        if not all(x.bias is None and _are_alike(x.weight, weight) for x, weight in pairs):
            return None
        return kernel_weight(enter.weight), kernel_weight(leave.weight)

    def _opened(self, tokens: Tensor) -> Tensor:
        """Return how much of the shared expert each token takes, `n 1`."""
        assert self.shared_gate is not None
        return elementwise(torch.sigmoid, project(self.shared_gate, tokens))

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks: some hidden channels of every expert on each."""
        size = self.experts_down.shape[2]
        own = Part(size, size)
        cuts = {"experts_gate_up": Cut(1, (own,) * (2 if self.kind == "swiglu" else 1)), "experts_down": Cut(2, (own,))}
        shared = {} if self.shared is None else self.shared.cuts()  # type: ignore[operator]
        return cuts | {f"shared.{name}": cut for name, cut in shared.items()}

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights (float32) and experts of each token, `n active`."""
        dtype = compute_dtype(tokens.dtype)
        if self.scores == "softmax":
            weights, chosen = F.softmax(project(self.router, tokens), -1, dtype=dtype).topk(self.active, -1)
        else:
            assert self.router_bias is not None
            scores = elementwise(torch.sigmoid, linear(tokens.to(dtype), self.router.weight.to(dtype)))
            wanted = scores + self.router_bias
            if self.groups > 1:
                grouped = wanted.unflatten(-1, (self.groups, -1))
                best = grouped.topk(2, -1)[0].sum(-1).topk(self.active_groups, -1)[1]  # n active_groups
                closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
                wanted = grouped.masked_fill(closed[..., None], -torch.inf).flatten(-2)
            chosen = wanted.topk(self.active, -1)[1]
            weights = scores.gather(-1, chosen)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights if self.scale == 1 else weights * self.scale, chosen

    def _mix(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sum over each token's experts."""
        if tokens.is_cuda:
            parts = self._parts_on_gpu(tokens, chosen)
        else:
            found = self.run_few(tokens, chosen)
            if tokens.shape[0] == 1:  # one token at a time needs no sorting
                one = torch.cat([self._expert(tokens, e) for e in chosen[0].tolist()]) if found is None else found[0]
                return matmul(weights, one)
            parts = self.run_sorted(tokens, chosen, self.one_by_one) if found is None else found
            if has_separate_rows(tokens, weights, parts):  # the same sum as for one token
                return torch.cat([matmul(own, row) for own, row in zip(weights.split(1), parts, strict=True)])
        return (parts * weights[..., None]).sum(1)  # summed in a fixed order, not by atomic additions

    def _parts_on_gpu(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Return the outputs of each token's experts, `n active hidden`.

        For few tokens, in bfloat16 (also of autocast), and while a CUDA graph is captured, nothing waits for a count.
        """
        quantised = coded(self.experts_gate_up) is not None and kernels_for(tokens) is not None
        if chosen.numel() <= (max(GATHERED, 2 * self.count) if quantised else GATHERED):  # codes are not copied
            return self.run_gathered(tokens, chosen)
        captured = torch.cuda.is_current_stream_capturing()
        gate_up, down = uncoded(self.experts_gate_up), uncoded(self.experts_down)
        if isinstance(gate_up, QuantisedWeight) or isinstance(down, QuantisedWeight):  # one by one, never all at once
            return self.run_gathered(tokens, chosen) if captured else self.run_sorted(tokens, chosen, self.one_by_one)
        even = all(n % 8 == 0 for n in down.shape[1:])  # rows of 16 bytes
        if even and (tokens.dtype == down.dtype == torch.bfloat16 or _lowered(tokens)):
            return self.run_sorted(tokens.bfloat16(), chosen, self.grouped)
        if tokens.shape[0] > ALL_EXPERTS and captured and needs_grad(tokens, gate_up, down):
            raise RuntimeError(
                "the host reads how many tokens each expert has, unless products of experts are in bfloat16 with sizes "
                "that are multiples of 8"
            )
        if tokens.shape[0] <= ALL_EXPERTS or captured:
            return self.run_all(tokens, chosen)
        return self.run_sorted(tokens, chosen, self.one_by_one)

    def run_gathered(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Run the experts on copies of their weights, one for each token and expert; quantised ones are not copied."""
        experts = chosen.flatten()
        if not needs_grad(tokens) and kernels_for(tokens) is not None and is_eager(tokens, chosen):
            quantised = self._gathered_quantised(tokens, experts)
            if quantised is not None:
                return quantised.view(*chosen.shape, -1)
        x = tokens[:, None, :].expand(-1, self.active, -1).flatten(0, 1)  # pairs hidden
        made = torch.bmm(_chosen(self.experts_gate_up, experts), x[..., None])[..., 0]
        made = torch.bmm(_chosen(self.experts_down, experts), self._activated(made)[..., None])[..., 0]
        return made.view(*chosen.shape, -1)

    def _gathered_quantised(self, tokens: Tensor, experts: Tensor) -> Tensor | None:
        """Return the outputs of a token's experts, `pairs hidden`, if all weights have 8 or 4 bits."""
        gate_up, down = coded(self.experts_gate_up), coded(self.experts_down)
        if gate_up is None or down is None:
            return None
        from lineate.kernels.layers import quantised_products  # triton, at its first use

        gated = self.kind == "swiglu" and quantised_products.takes_gate(gate_up)
        pairs = quantised_products.Pairs(experts.contiguous(), self.active)
        made = quantised_products.multiply_experts(tokens.contiguous(), gate_up, pairs, gated=gated)
        pairs = quantised_products.Pairs(experts.contiguous(), 1)
        return quantised_products.multiply_experts(made if gated else self._activated(made), down, pairs)

    def run_few(self, tokens: Tensor, chosen: Tensor) -> Tensor | None:
        """Run the experts of a few tokens on a CPU, each product in one call of C; None where C does not.

        The results have the bits of one_by_one.
        """
        gate_up, down = self.experts_gate_up, self.experts_down
        if (
            not self._runs_own_code
            or not tokens.is_cpu
            or not 0 < tokens.shape[0] <= experts_in_c.MOST_ROWS
            or needs_grad(tokens, gate_up, down)
        ):
            return None
        if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu") or not is_eager(tokens, chosen):
            return None
        enter, leave = _in_c(gate_up, tokens.dtype), _in_c(down, tokens.dtype)
        if enter is None or leave is None:
            return None
        rows: dict[int, list[int]] = {}
        for pair, e in enumerate(chosen.flatten().tolist()):
            rows.setdefault(e, []).append(pair)
        names = sorted(rows)
        order = torch.tensor([pair for e in names for pair in rows[e]], device="cpu")
        counts = [len(rows[e]) for e in names]
        x = tokens.float().index_select(0, order // self.active)
        made = _rounded(experts_in_c.multiply(x, enter, names, counts), tokens.dtype)
        few = max(1, GRAIN // made.shape[1])  # rows that torch computes by one thread
        made = torch.cat([self._activated(part).float() for part in made.split(few)])
        made = _rounded(experts_in_c.multiply(made, leave, names, counts), tokens.dtype)
        return torch.empty_like(made).index_copy_(0, order, made).view(*chosen.shape, -1)

    def run_all(self, tokens: Tensor, chosen: Tensor) -> Tensor:
        """Run all experts on all tokens, and keep the outputs of the chosen experts."""
        x = tokens.expand(self.count, -1, -1)
        made = self._activated(torch.bmm(x, uncoded(self.experts_gate_up).transpose(1, 2)))
        made = torch.bmm(made, uncoded(self.experts_down).transpose(1, 2))
        return made[chosen, torch.arange(tokens.shape[0], device=tokens.device)[:, None]]

    def run_sorted(self, tokens: Tensor, chosen: Tensor, run: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Run the experts on tokens sorted by expert, so that each expert has one product."""
        experts, order = chosen.flatten().sort(stable=True)
        made = run(tokens[order // self.active], experts)
        back = torch.empty_like(order).index_copy(0, order, torch.arange(order.shape[0], device=order.device))
        return made[back].view(*chosen.shape, -1)

    def one_by_one(self, gathered: Tensor, experts: Tensor) -> Tensor:
        """Run each expert on its tokens; experts `n` names the expert of each token, in ascending order."""
        sizes = experts.bincount(minlength=self.count).tolist()
        return torch.cat([self._expert(own, e) for e, own in enumerate(gathered.split(sizes)) if own.shape[0]])

    def grouped(self, gathered: Tensor, experts: Tensor) -> Tensor:
        """Run all experts in one launch, as one_by_one, in the tokens' dtype; autocast leaves weights in float32."""
        ends = torch.searchsorted(experts, torch.arange(self.count, device=experts.device), right=True, out_int32=True)
        gate_up, down = (uncoded(x).to(gathered.dtype) for x in (self.experts_gate_up, self.experts_down))
        made = F.grouped_mm(gathered, gate_up.transpose(1, 2), offs=ends)
        return F.grouped_mm(self._activated(made), down.transpose(1, 2), offs=ends)

    def _expert(self, tokens: Tensor, e: int) -> Tensor:
        return linear(self._activated(linear(tokens, self.experts_gate_up[e])), self.experts_down[e])

    def _activated(self, made: Tensor) -> Tensor:
        return glu(made) if self.kind == "swiglu" else squared_relu(made)


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in this dtype, by one thread: where other processes run, torch's threads wait for each other."""
    return x if x.dtype is dtype else elementwise(lambda part: part.to(dtype), x)


def _in_c(weight: Tensor, dtype: torch.dtype) -> experts_in_c.Weight | None:
    """Return the weights of experts as C multiplies rows of this dtype by them; None if it does not."""
    _, n, k = weight.shape
    if isinstance(weight, QuantisedWeight) and not weight.format.has_codes:  # 16 bits, which rows of float32 meet
        numbers = weight.codes
        if weight.dtype is not dtype or dtype is not torch.float32 or not experts_in_c.serves(numbers.dtype):
            return None
        return experts_in_c.Weight(numbers, n, k) if numbers.is_contiguous() else None
    if isinstance(weight, QuantisedWeight):
        product, scales = weight.format.product, weight.scales
        if product is None or scales is None or weight.dtype is not dtype or not experts_in_c.serves(torch.uint8):
            return None
        if not (weight.codes.is_contiguous() and scales.is_contiguous()):
            return None
        return experts_in_c.Weight(weight.codes, n, k, scales, product, are_rounded())
    if type(weight) not in PLAIN_TENSORS or weight.dtype is not dtype or not weight.is_contiguous():
        return None
    if is_virtual(weight) or not experts_in_c.serves(dtype):
        return None
    return experts_in_c.Weight(weight, n, k)


def _are_alike(own: Tensor, weight: Tensor) -> bool:
    """Whether a weight has the shape, the dtype and the format of those of experts."""
    if own.shape != weight.shape[1:] or own.dtype is not weight.dtype or type(own) is not type(weight):
        return False
    if isinstance(own, QuantisedWeight) and isinstance(weight, QuantisedWeight):
        return own.format is weight.format
    return True


def _lowered(tokens: Tensor) -> bool:
    """Whether autocast computes products with tokens on a GPU in bfloat16."""
    lowers = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") is torch.bfloat16
    return lowers and tokens.dtype is not torch.float64


def _chosen(weight: Tensor, experts: Tensor) -> Tensor:
    """Return the weights of these experts; of a weight in codes, no others are decoded."""
    if not isinstance(weight, QuantisedWeight) or not weight.format.has_codes:
        return uncoded(weight).index_select(0, experts)
    few = weight.with_parts(lambda part: part.index_select(0, experts))
    shape = len(experts), *weight.shape[1:]
    return QuantisedWeight(few.codes, few.scales, shape, weight.format, weight.dtype).decoded()


_METHODS = frozenset(name for name, x in vars(MixtureOfExperts).items() if callable(x))
