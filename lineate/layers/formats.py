"""The format of memories between tokens: as the layers compute them, or in bfloat16, which takes half the bytes.

Only memories of linear rules that forget or correct can be kept in bfloat16; TensorSpec.dtypes says so. All other parts
of a state are unchanged: convolutions, caches, memories that learn, and sums that never forget.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lineate.checks import check_choice
from lineate.layers.state import LayerState, Memory, TensorSpec
from lineate.ops.rounding import NEAREST, ROUNDINGS, STOCHASTIC
from lineate.torch_ops.dtypes import parse_dtype

Specs = tuple[tuple[TensorSpec, ...], ...]
"""The tensors of every layer's state."""
KNOWN = {"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class StateFormat:
    """The format of a pool's memories between tokens.

    Args:
        dtype: torch.bfloat16 for layers that support it; torch.float32: as the layers compute them.
        rounding: "nearest" or "stochastic", of bfloat16.
    """

    dtype: torch.dtype = torch.float32
    rounding: str = NEAREST

    @staticmethod
    def of(state_dtype: "str | torch.dtype | None", state_rounding: str = NEAREST) -> "StateFormat":
        """Return the format of these options; None is float32.

        Args:
            state_dtype: "float32" or "bfloat16", or the torch.dtype.
            state_rounding: "nearest" or "stochastic".
        """
        dtype = torch.float32 if state_dtype is None else parse_dtype(state_dtype, "state_dtype", KNOWN)
        check_choice("state_rounding", state_rounding, ROUNDINGS)
        if state_rounding == STOCHASTIC and dtype is not torch.bfloat16:
            raise ValueError(
                "state_rounding='stochastic' needs state_dtype='bfloat16', got float32; leave it 'nearest'"
            )
        return StateFormat(dtype, state_rounding)

    @property
    def is_narrow(self) -> bool:
        """Whether memories are bfloat16."""
        return self.dtype is torch.bfloat16

    def specs(self, specs: Specs) -> Specs:
        """Return the tensors of a state in this format; raise if no layer's memory can be bfloat16.

        Args:
            specs: the tensors of every layer's state as the layers compute it.
        """
        if not self.is_narrow:
            return specs
        kept = tuple(tuple(spec.kept_in(self.dtype) for spec in layer) for layer in specs)
        if kept == specs:
            raise ValueError(
                "state_dtype='bfloat16' needs a layer with a memory that can be kept so (gated linear attention, "
                "DeltaNet, Gated DeltaNet, Kimi Delta Attention, Mamba-2, computed in float32), got none; "
                "leave it 'float32'"
            )
        return kept

    def seeds(self, positions: Tensor) -> Tensor | None:
        """Return the seeds of rows at these positions in their sequences; None without stochastic rounding.

        Args:
            positions: `rows`, int64: the tokens that each row has read.
        """
        return positions if self.rounding == STOCHASTIC else None


AS_COMPUTED = StateFormat()


def convert(state: LayerState, specs: Sequence[TensorSpec]) -> LayerState:
    """Return a layer's state with memories of several possible dtypes in those of their specs, rounded to the nearest.

    Args:
        state: the state; tensors with a single dtype are unchanged.
        specs: its tensors.
    """
    kept = {spec.name: spec.dtype for spec in specs if spec.dtypes}
    if not isinstance(state, Memory) or all(state[name].dtype == dtype for name, dtype in kept.items()):
        return state
    return Memory({name: x.to(kept.get(name, x.dtype)) for name, x in state.tensors.items()})
