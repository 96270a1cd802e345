"""A block of a model: a mixer and, in most models, a feed-forward, each with a norm and a residual.

x = x + mixer(norm(x))      x = x + feed(norm(x))
"""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lineate.layers import Carried, ChannelMix, LayerState, Memory, MixtureOfExperts, RMSNorm, TensorSpec, kind_of
from lineate.layers.entry import check_result
from lineate.layers.feed import make_feed as make_dense
from lineate.layers.invariant import applies
from lineate.layers.registry import check_made
from lineate.layers.step.launches import Mixed, feed_step, is_step, mix_step, runs_steps, sum_and_norm
from lineate.layers.trail import Trail, trail, trail_each
from lineate.models.config import HybridConfig
from lineate.models.scaling import make_norm
from lineate.parallel.context.segments import Bounds
from lineate.parallel.tensor.ranks import Ranks
from lineate.torch_ops.invariance import NotInvariant, is_batch_invariant

_Kept = TypeVar("_Kept")


def make_mixer(config: HybridConfig, letter: str, layer: int | None = None) -> nn.Module:
    """Make the mixer of a pattern's letter: that of a layer with this letter, or (None) of the first one."""
    kind = kind_of(letter)
    if layer is not None:
        part = config.part_of(layer)
    else:
        part = config.part(kind) if kind.first is None else kind.first(config.part(kind))
    return check_made(kind, kind.make(config, part))


def make_feed(config: HybridConfig, layer: int) -> nn.Module | None:
    """Make a layer's feed-forward; None if it has none."""
    if layer in config.mixer_only:
        return None
    if not config.has_experts(layer):
        assert config.feed is not None
        return make_dense(config.feed.kind, config.hidden_size, config.feed.size)
    experts = config.experts
    assert experts is not None
    return MixtureOfExperts(
        config.hidden_size, experts.count, experts.active, experts.size, shared_size=experts.shared_size,
        shared_gate=experts.shared_gate, scores=experts.scores, renormalize=experts.renormalize, scale=experts.scale,
        groups=experts.groups, active_groups=experts.active_groups, kind=experts.kind,
    )  # fmt: skip


class Block(nn.Module):
    """A mixer and a feed-forward, if it has one, with residuals; norm_after normalises outputs instead of inputs."""

    ranks: Ranks | None = None
    """If set, mixer and feed-forward are one rank's shares, whose results are summed over the ranks."""
    recompute: bool = False
    """Keep only the input for the backward pass, which computes the rest again."""
    carries: bool = False
    """Whether the mixer reads or writes what the layers of a call hand on, lineate.layers.state.Carried."""
    _in_steps: bool
    """Whether the sums of a step are those of layers/step/launches.py."""
    _checked: tuple[TensorSpec, ...] | None = None
    """The state_spec that the results of a mixer of the user's own are compared with; None: it is one of lineate."""

    def __init__(self, config: HybridConfig, layer: int) -> None:
        super().__init__()
        letter = config.letters[layer]
        kind = kind_of(letter)
        self.norm_after = letter in config.norm_after
        self.mixer_norm = make_norm(config)
        self.mixer = make_mixer(config, letter, layer)
        if not kind.built_in:
            self._checked = self.mixer.state_spec  # type: ignore[assignment]
        if kind.first is not None:
            self.carries = True
        self.residual_scale = config.residual_scale
        fed = layer not in config.mixer_only
        self.feed_norm = make_norm(config) if fed else None
        self.feed = make_feed(config, layer)
        self.state_names = tuple(spec.name for spec in self.state_specs)
        plain = not self.norm_after and self.residual_scale == 1 and type(self.mixer_norm) is RMSNorm
        self._in_steps = plain and not self.carries and not self.feed_specs

    @property
    def feed_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors that the feed-forward has in the state; none for most."""
        return self.feed.state_spec if isinstance(self.feed, ChannelMix) else ()

    @property
    def state_specs(self) -> tuple[TensorSpec, ...]:
        """The tensors of the block's state: those of the mixer, then those of the feed-forward."""
        specs: tuple[TensorSpec, ...] = self.mixer.state_spec  # type: ignore[assignment]
        return (*specs, *self.feed_specs)

    def forward(
        self, x: Tensor, state: LayerState | None = None, cu_seqlens: Bounds = None, carried: Carried | None = None
    ) -> tuple[Tensor, LayerState]:
        """Run the block on x `b t hidden`; carried: what the layers of this call hand on, if any of them does."""
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.mix_and_feed, x, state, cu_seqlens, carried, use_reentrant=False)
        return self.mix_and_feed(x, state, cu_seqlens, carried)

    def trail(
        self, x: Tensor, state: LayerState, keep: str = "auto", carried: Carried | None = None
    ) -> tuple[Tensor, Trail]:
        """Run the block on guessed tokens x `b t hidden`; return the states after each (layers/trail.py)."""
        if self.carries or self.feed_specs:
            return self._trail_each(x, state, carried)
        if not self._in_steps or self.ranks is not None or not runs_steps(x):
            return self._around(x, lambda y: trail(self.mixer, y, state, keep))
        y, kept = trail(self.mixer, self.mixer_norm(x), state, keep)
        if self.feed is None or self.feed_norm is None:
            return x + y, kept
        return self._feed_tokens(x, y), kept

    def _trail_each(self, x: Tensor, state: LayerState, carried: Carried | None) -> tuple[Tensor, Trail]:
        """Run the whole block token by token."""
        firsts = []

        def run(token: slice, before: LayerState) -> tuple[Tensor, LayerState]:
            given = None if carried is None or carried.first_value is None else carried.first_value[:, token]
            own = Carried(given)
            result = self.mix_and_feed(x[:, token], before, None, own)
            firsts.append(own.first_value)
            return result

        y, kept = trail_each(run, x.shape[1], state)
        if carried is not None and carried.first_value is None and self.carries:
            carried.first_value = torch.cat([first for first in firsts if first is not None], 1)
        return y, kept

    def mix_and_feed(
        self, x: Tensor, state: LayerState | None, cu_seqlens: Bounds, carried: Carried | None = None
    ) -> tuple[Tensor, LayerState]:
        """Add the mixer's output to x `b t hidden`, then that of the feed-forward."""
        if cu_seqlens is None and self._in_steps and self.ranks is None and is_step(x, state):
            assert state is not None
            return self._step(x, state)
        if applies(x):
            raise NotInvariant("a block whose parts are not those of a step")
        if self.feed_specs:
            return self._mix_and_shift(x, state, cu_seqlens, carried)
        return self._around(x, lambda y: self._mix(y, state, cu_seqlens, carried))

    def _mix_and_shift(
        self, x: Tensor, state: LayerState | None, cu_seqlens: Bounds, carried: Carried | None
    ) -> tuple[Tensor, LayerState]:
        """Run a block whose feed-forward has a part of the state."""
        own, before, after = state, None, {}
        if state is not None:
            names = {spec.name for spec in self.feed_specs}
            given = {name: state[name] for name in state.names}
            own = Memory({name: y for name, y in given.items() if name not in names})
            before = Memory({name: y for name, y in given.items() if name in names})

        def feed(y: Tensor) -> Tensor:
            assert self.feed is not None
            y, fed = self.feed(y, before, cu_seqlens)
            after.update(fed.tensors)
            return y

        x, kept = self._around(x, lambda y: self._mix(y, own, cu_seqlens, carried), feed)
        return x, Memory({**kept.tensors, **after})

    def _around(
        self,
        x: Tensor,
        mix: Callable[[Tensor], tuple[Tensor, _Kept]],
        feed: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, _Kept]:
        """Run mix and feed (None: the feed-forward), each with norm and residual; return what mix keeps, too."""
        y, kept = mix(self._entered(x if self.norm_after else self.mixer_norm(x)))
        y = self._left(y)
        if type(self.feed) is MixtureOfExperts and self._in_steps and self.ranks is None and runs_steps(x):
            return self._feed_tokens(x, y), kept
        x = self._added(x, self.mixer_norm(y) if self.norm_after else y)
        if self.feed is None or self.feed_norm is None:
            return x, kept
        y = self._left((feed or self.feed)(self._entered(x if self.norm_after else self.feed_norm(x))))
        return self._added(x, self.feed_norm(y) if self.norm_after else y), kept

    def _entered(self, x: Tensor) -> Tensor:
        return x if self.ranks is None else self.ranks.enter(x)

    def _left(self, y: Tensor) -> Tensor:
        return y if self.ranks is None else self.ranks.leave(y)

    @property
    def in_steps(self) -> bool:
        """Whether the block is x + mixer(norm(x)), then x + feed(norm(x)) if it has one, for lineate's own mixers."""
        return self._in_steps and self._checked is None and self.ranks is None

    def run_mixer(self, x: Tensor, state: LayerState | None) -> tuple[Tensor, LayerState]:
        """Return x + mixer(norm(x)) and the new state, for a block with steps."""
        y, kept = self._mix(self.mixer_norm(x), state, None)
        return x + y, kept

    def run_feed(self, x: Tensor) -> Tensor:
        """Return x + feed(norm(x)), for a block with steps."""
        assert self.feed is not None and self.feed_norm is not None
        return x + self.feed(self.feed_norm(x))

    def _feed_tokens(self, x: Tensor, y: Tensor) -> Tensor:
        """Run run_feed on x + y `b t hidden` on a GPU, each token as a row of a step where that has few launches."""
        assert self.feed is not None and isinstance(self.feed_norm, RMSNorm)
        total, normed = sum_and_norm(self.feed_norm, x.flatten(0, 1), y.flatten(0, 1))
        fed = feed_step(self.feed_norm, self.feed, total[:, None], normed)
        return self.run_feed(total.view_as(x)) if fed is None else fed.view_as(x)

    def _added(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self.residual_scale == 1 else x + self.residual_scale * y

    def _step(self, x: Tensor, state: LayerState) -> tuple[Tensor, LayerState]:
        """Run one token a row on a GPU, where the state may be overwritten: the same sums in fewer launches."""
        norm, then = self.mixer_norm, self.feed_norm
        assert isinstance(norm, RMSNorm) and isinstance(then, RMSNorm | None)
        mixed = mix_step(norm, self.mixer, x, state, then)
        if mixed is None:
            if is_batch_invariant():
                raise NotInvariant(f"a mixer {type(self.mixer).__name__} without a step of its own")
            x, kept = self.run_mixer(x, state)
            mixed = Mixed(x, None, kept)
        if self.feed is None or then is None:
            return mixed.x, mixed.state
        fed = feed_step(then, self.feed, mixed.x, mixed.normed)
        if fed is None and is_batch_invariant():
            raise NotInvariant(f"a feed-forward {type(self.feed).__name__} without a step of its own")
        return (self.run_feed(mixed.x) if fed is None else fed), mixed.state

    def _mix(
        self, x: Tensor, state: LayerState | None, cu_seqlens: Bounds, carried: Carried | None = None
    ) -> tuple[Tensor, LayerState]:
        result = self.mixer(x, state, cu_seqlens, *((carried,) if self.carries else ()))
        return result if self._checked is None else check_result(self.mixer, self._checked, result, x, cu_seqlens)
