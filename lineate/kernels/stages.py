"""The interface between the sequencing of a call (pipeline.py) and the kernels of an architecture: the stages.

    forward     prepare: scores, inverse and factors of every chunk, all chunks at once
                forward walk: from chunk to chunk, the state and the output
    backward    prepare again
                backward walk: the same walk from the last chunk to the first, for dS
                gradients: those of every chunk at once
    decode      a few tokens in one launch, the state updated in place; or one token, which goes into a ring

A long walk may be cut into segments that run in parallel (segments.py, portable/split.py): a walk without an output
first finds the affine map of each segment, and chain_segments the states at the cuts between them. Backwards, segments
and cuts are numbered from the end of a sequence.

A folder implements `Stages`: portable/ in Triton, for every device; hopper/ in Gluon, for compute capability 9.0.
Whatever depends on a call's dtype or sizes is decided inside the folder.

Four words that the kernels use:

    walk     A loop of one program over a sequence in order, which carries something from step to step: here the state,
             from chunk to chunk. kernels/layers/convolution.py walks from token to token with the last inputs,
             kernels/memories/ from chunk to chunk with the weights of a memory that learns.
    wild     A row (token) of a chunk is wild if the fast products could overflow or lose digits there: in the inverse,
             whose products are float16's for bfloat16 inputs, because its beta is negative, or its beta, |k|^2 or
             beta |k|^2 is too large (portable/solve.py); in hopper/channel.py, also because a channel has decayed too
             far since the first row of its block of 16. The first wild row of each chunk and all later ones are
             recomputed, more slowly. In the gradients of hopper/channel_gradients.py, `wild` marks whole chunks,
             for 64 key channels at a time.
    tame     Not wild.
    board    A small float32 tile in shared memory with one number a block of 16 rows and key channel, through which the
             warps of a program exchange these numbers (hopper/channel.py, hopper/channel_gradients.py).
"""

from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lineate.call import Inputs, Options, RingTensors, Slots
from lineate.kernels.call import Call, Gates


class InWalk(Enum):
    """The parts of a chunk's scores and inverse that a forward walk computes itself."""

    NOTHING = 0
    SCORES = 1
    """P."""
    ALL = 2
    """P and T."""


class Second(NamedTuple):
    """The second writer of a call, the key; its values are those of the call. What is erased is the first."""

    w: Tensor
    """Kw."""
    P: Tensor
    """`slot hv c c`."""
    M: Tensor
    """`slot hv c c`."""
    norms: Tensor | None = None
    """`slot hv 2 c`, as Prepared.norms; those of the first writer have 1 in place of 1 / |k_i|."""


class Prepared(NamedTuple):
    """The parts of a call without the state. q, k, w are Qr, Kr, Kw if decay is per channel, else q, k, k."""

    q: Tensor
    k: Tensor
    w: Tensor
    P: Tensor | None
    """`slot hv c c`; None if the forward walk makes it."""
    T: Tensor | None
    """`slot hv c c`; None if the rule only accumulates, or if the forward walk makes it."""
    M: Tensor | None
    """`slot hv c c`, for the backward with decay per channel."""
    factors: Tensor
    wild: Tensor | None = None
    """`slot hv`: the first wild row of each chunk, or c if none is; None if all products are float32's."""
    made: Tensor | None = None
    """`slot hv`: a 1 for each chunk whose P and T are written; only if they are computed while the walk runs."""
    norms: Tensor | None = None
    """`slot hv 2 c`: scale / |q_i|, 1 / |k_i|; only where one kernel computes them for another."""
    second: Second | None = None
    """The key that is written, if it is not what is erased; k, w, P and T are then those of what is erased."""


class ForwardWalk(NamedTuple):
    """The tensors that a forward walk reads and fills. Without an output it finds the maps of the segments."""

    outer: Tensor
    """`sequence hv k v`: the state before each sequence."""
    inner: Tensor | None
    """`cut hv k v`: the state at each cut; None for maps, and if no sequence is cut."""
    output: Tensor | None
    final: Tensor
    """`sequence hv k v`; for maps, `cut hv k (v + k)`."""
    states: Tensor | None
    """`slot hv v k`: gets the state entering each chunk, if given."""
    more: bool = False
    """Whether a walk over the next tokens follows, whose scores may be computed while this one runs."""

    @property
    def map_only(self) -> bool:
        """Whether the walk finds the affine maps of the segments instead of the output."""
        return self.output is None


class BackwardWalk(NamedTuple):
    """The tensors that a backward walk reads and fills. Without dvalues it finds the maps of the segments."""

    doutput: Tensor
    outer: Tensor
    """`sequence hv k v`: dS after each sequence."""
    inner: Tensor | None
    """`cut hv k v`: dS at each cut; None for maps, and if no sequence is cut."""
    dvalues: Tensor | None
    """Gets X, or dV if the rule only accumulates."""
    dstart: Tensor
    """`sequence hv k v`: dS before the first chunk; for maps, `cut hv k (v + k)`."""
    dstates: Tensor | None
    """`slot hv v k`: gets the dS that left each chunk."""

    @property
    def map_only(self) -> bool:
        """Whether the walk finds the affine maps of the segments instead of the gradients."""
        return self.dvalues is None


class Around(NamedTuple):
    """The states around every chunk, from which its gradients are computed."""

    doutput: Tensor
    states: Tensor
    """`slot hv v k`: the state that entered each chunk."""
    dstates: Tensor
    """`slot hv v k`: the gradient of the state that left it."""


class Gradients(NamedTuple):
    """The buffers of the gradients, in the shapes and dtypes of their inputs; None for absent inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    beta: Tensor | None
    state: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    probe: Tensor | None = None
    direction: Tensor | None = None


class RawGradients(NamedTuple):
    """The buffers of the gradients of raw gates per head, all contiguous."""

    gate: Tensor
    write: Tensor
    A_log: Tensor
    """Left alone if the call has no A_log."""
    dt_bias: Tensor
    """Left alone if the call has no dt_bias."""


class Piece(NamedTuple):
    """Some tokens of a call, one after another."""

    tokens: slice
    stages: "Stages"


class Stages(Protocol):
    """The stages of one call on one architecture."""

    call: Call
    walk_columns: int
    """Value columns of one program of a walk, by which a walk's programs are counted before it is cut."""
    widest_chain: int
    """The most key channels that chain_segments takes."""

    def __init__(self, call: Call) -> None: ...

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        """Whether these stages run on the device."""

    @staticmethod
    def makes_beside(inputs: Inputs, options: Options) -> bool:
        """Whether scores are computed during a walk that leaves multiprocessors idle; few segments do not help then."""

    def variant(self) -> tuple[object, ...]:
        """Return the keys of the compiled kernels other than the shapes and dtypes of a call."""

    def pieces(self) -> list["Piece"]:
        """Return consecutive pieces of the tokens: the scores of one are computed while the walk before it runs."""

    def made_in_walk(self, keep: bool) -> InWalk:
        """Return the parts that the forward walk computes itself. keep: whether it keeps the states."""

    def prepare(self, in_walk: InWalk = InWalk.NOTHING, for_backward: bool = False) -> Prepared:
        """Return scores, inverse and factors of every chunk, except those that the walk computes."""

    def walk_forward(self, ready: Prepared, walk: ForwardWalk) -> None:
        """Go from chunk to chunk and fill the buffers of the walk."""

    def walk_backward(self, ready: Prepared, walk: BackwardWalk) -> None:
        """Go from the last chunk to the first and fill the buffers of the walk."""

    def chain_segments(self, maps: Tensor) -> Tensor:
        """Return the states at the cuts, `cut hv k v`, from the maps of the segments before them."""

    def gradients(self, ready: Prepared, around: Around, grads: Gradients) -> None:
        """Fill the gradients of every chunk's inputs. grads.v holds the backward walk's dvalues."""

    @staticmethod
    def raw_gate_gradients(gates: Gates, dlog_decay: Tensor, dbeta: Tensor, raw: RawGradients) -> None:
        """Fill the gradients of those gates that are raw from those of log_decay and beta per head, without gaps."""

    @staticmethod
    def decode(inputs: Inputs, slots: Slots, options: Options) -> Tensor:
        """Return the output `b t hv v` of a few tokens; inputs.state is updated in place."""

    @staticmethod
    def decode_ring(
        inputs: Inputs, slots: Slots, ring: RingTensors, options: Options, *, settled: bool = False
    ) -> Tensor:
        """Return the output `b 1 hv v` of one token a row, which goes into the ring, or with it into inputs.state.

        Args:
            inputs: The token, and the state.
            slots: Where the states lie, and seeds.
            ring: The ring of the states.
            options: The options of the call.
            settled: Whether no recent launch writes the state or the ring (launching.overlapping).
        """
