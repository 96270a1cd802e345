"""The stages in Triton, which define those of every other architecture and serve devices without their own."""

import torch
from torch import Tensor

from lineate.call import Inputs, Options, RingTensors, Slots
from lineate.kernels.call import Call, Gates
from lineate.kernels.portable import launch_gradients, launch_scores, launch_second, launch_walks
from lineate.kernels.portable.decode import decode
from lineate.kernels.portable.decode_general import decode_general
from lineate.kernels.portable.launch_ring import decode_ring
from lineate.kernels.portable.split import CHAIN_WIDTH
from lineate.kernels.stages import Around, BackwardWalk, ForwardWalk, Gradients, InWalk, Piece, Prepared, RawGradients


class PortableStages:
    """The stages of one call in Triton.

    Another architecture may derive from it and override whole stages, or only the scores
    (fill_head_scores, fill_channel_scores) or the gradients (head_gradients, channel_gradients).
    """

    walk_columns = 64
    widest_chain = CHAIN_WIDTH

    products: tuple[str, ...]
    """The products of the inverse, one launch each: in float16 for tame rows, then in float32 for the wild ones."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.products = self.choose_products()

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        """Whether Triton runs on the device: always True."""
        return True

    def choose_products(self) -> tuple[str, ...]:
        """Return products.

        Products in float16 have 11 bits, which is more than bfloat16 inputs need and as many as float16 inputs have.
        With a probe, no bound of single rows keeps the inverse in their range: I - k (erase * k)^T, as a step, may grow
        without end even where erase is in [0, 2].
        """
        if self.call.q.dtype != torch.bfloat16 or self.call.gates.probe is not None:
            return ("tf32x3",)
        return ("fp16", "tf32x3") if self.call.corrects and not self._always_tame else ("fp16",)

    @property
    def _always_tame(self) -> bool:
        """Whether no row can be wild: keys have unit length, beta comes from a logit, and decay is not per channel."""
        call = self.call
        return call.normalize_qk and call.gates.raw_beta and not call.channel and call.gates.beta_scale <= 2.0

    @staticmethod
    def makes_beside(inputs: Inputs, options: Options) -> bool:
        """Whether scores are computed in parallel with a walk: never."""
        return False

    def variant(self) -> tuple[object, ...]:
        """Return the keys of the compiled kernels other than the shapes and dtypes of a call."""
        return (self.products,)

    def pieces(self) -> list[Piece]:
        """Return consecutive pieces of the tokens: all of them in one."""
        return [Piece(slice(0, self.call.q.shape[1]), self)]

    def made_in_walk(self, keep: bool) -> InWalk:
        """Return the parts that the forward walk computes itself: none."""
        return InWalk.NOTHING

    def prepare(self, in_walk: InWalk = InWalk.NOTHING, for_backward: bool = False) -> Prepared:
        """Return the scores, inverse and factors of every chunk, except those that the walk computes."""
        call = self.call
        if call.channel:
            ready = self.make_channel_room(for_backward)
            self.fill_channel_scores(ready)
            if call.gates.direction is None:
                return ready
            writer = launch_second.make_second_room(ready)
            self.fill_second_scores(writer)
            return launch_second.with_second(ready, writer)
        ready = self.make_head_room(in_walk)
        launch_scores.fill_factors(call, ready)
        if ready.P is not None or ready.T is not None:
            self.fill_head_scores(ready, for_backward)
            if len(self.products) > 1:
                self.fill_wild_rows(ready)
        return ready

    @property
    def looks_for_wild(self) -> bool:
        """Whether the first wild row of every chunk is computed, which products in float16 need."""
        return self.products[0] == "fp16"

    def make_head_room(self, in_walk: InWalk) -> Prepared:
        """Return the buffers that fill_head_scores fills, and those of the factors."""
        return launch_scores.make_head_room(self.call, self.looks_for_wild, in_walk)

    def make_channel_room(self, for_backward: bool) -> Prepared:
        """Return the buffers that fill_channel_scores fills."""
        return launch_scores.make_channel_room(self.call, self.looks_for_wild, for_backward, norms=False)

    def fill_channel_scores(self, ready: Prepared) -> None:
        """Fill the buffers of a call with decay per channel."""
        for n, products in enumerate(self.products):
            launch_scores.fill_channel_scores(self.call, ready, products, again=n > 0)

    def fill_second_scores(self, writer: Prepared) -> None:
        """Fill Kw, P and M of the key that is written, where another direction is erased."""
        launch_scores.fill_channel_scores(self.call, writer, self.products[0], second=True)

    def fill_head_scores(self, ready: Prepared, for_backward: bool) -> None:
        """Fill P and T with decay per head or none; if wild rows are found, fill only the tame rows of T."""
        launch_scores.fill_head_scores(self.call, ready, self.products[0])

    def fill_wild_rows(self, ready: Prepared) -> None:
        """Fill the rows of T from the first wild one on, with decay per head or none."""
        launch_scores.fill_wild_rows(self.call, ready)

    def walk_forward(self, ready: Prepared, walk: ForwardWalk) -> None:
        """Go from chunk to chunk and fill the buffers of the walk."""
        launch_walks.walk_forward(self.call, ready, walk)

    def walk_backward(self, ready: Prepared, walk: BackwardWalk) -> None:
        """Go from the last chunk to the first and fill the buffers of the walk."""
        launch_walks.walk_backward(self.call, ready, walk)

    def chain_segments(self, maps: Tensor) -> Tensor:
        """Return the states at the cuts, `cut hv k v`, from the maps of the segments before them."""
        return launch_walks.chain_segments(self.call, maps)

    def gradients(self, ready: Prepared, around: Around, grads: Gradients) -> None:
        """Fill the gradients of every chunk's inputs. grads.v holds the backward walk's dvalues."""
        if self.call.channel:
            self.channel_gradients(ready, around, grads)
        else:
            self.head_gradients(ready, around, grads)

    def head_gradients(self, ready: Prepared, around: Around, grads: Gradients) -> None:
        """Fill the gradients with decay per head or none."""
        launch_gradients.fill_head_gradients(self.call, ready, around, grads)

    def channel_gradients(self, ready: Prepared, around: Around, grads: Gradients) -> None:
        """Fill the gradients with decay per channel."""
        if ready.second is not None:
            launch_second.fill_both_gradients(self.call, ready, around, grads)
            return
        work = launch_gradients.fill_residuals(self.call, ready, around, grads)
        launch_gradients.fill_channel_gradients(self.call, around, work, grads)

    @staticmethod
    def raw_gate_gradients(gates: Gates, dlog_decay: Tensor, dbeta: Tensor, raw: RawGradients) -> None:
        """Fill the gradients of raw gates from those of log_decay and beta per head, which are contiguous."""
        launch_gradients.fill_raw_gate_gradients(gates, dlog_decay, dbeta, raw)

    @staticmethod
    def decode(inputs: Inputs, slots: Slots, options: Options) -> Tensor:
        """Return the output `b t hv v` of a few tokens; inputs.state is updated in place."""
        return (decode_general if options.rule.general else decode)(inputs, slots, options)

    @staticmethod
    def decode_ring(
        inputs: Inputs, slots: Slots, ring: RingTensors, options: Options, *, settled: bool = False
    ) -> Tensor:
        """Return the output `b 1 hv v` of one token a row, which goes into the ring, or with it into inputs.state."""
        return decode_ring(inputs, slots, ring, options, settled=settled)
