"""The feed-forward of RWKV-7: a token shift, then squared ReLU without a gate."""

import torch
from torch import Tensor, nn

from lineate.layers.projection import project
from lineate.layers.rwkv.shift import mix_previous, previous_tokens, shift_spec, shift_weights
from lineate.layers.state import Memory, TensorSpec
from lineate.parallel.tensor.shards import Cut, Part

SHIFT = "feed_shift"
"""The name of the last token in the state."""


class ChannelMix(nn.Module):
    """down(relu(up(x_t + (x_{t-1} - x_t) * shift))^2); the state is the last token.

    Args:
        hidden_size: channels of the tokens that come in and go out.
        size: hidden channels.
    """

    def __init__(self, hidden_size: int, size: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.empty(hidden_size))
        self.up_proj = nn.Linear(hidden_size, size, bias=False)
        self.down_proj = nn.Linear(size, hidden_size, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.shift.copy_(shift_weights(len(self.shift), 0.0625))

    @property
    def state_spec(self) -> tuple[TensorSpec, ...]:
        return (shift_spec(SHIFT, len(self.shift), self.shift.dtype),)

    def forward(
        self, x: Tensor, state: Memory | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Memory]:
        """Run the feed-forward on x `b t hidden`; return it and the state."""
        previous, last = previous_tokens(x, None if state is None else state[SHIFT], cu_seqlens)
        inner = project(self.up_proj, mix_previous(x, previous - x, self.shift))
        return project(self.down_proj, inner.relu().square()), Memory({SHIFT: last})

    def cuts(self) -> dict[str, Cut]:
        """Return how the parameters are shared out among ranks, by hidden channels; the shift is whole on each."""
        own = Part(self.down_proj.in_features, self.down_proj.in_features)
        return {"up_proj.weight": Cut(0, (own,)), "down_proj.weight": Cut(1, (own,))}
