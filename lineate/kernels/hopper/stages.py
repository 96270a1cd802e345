"""The stages for compute capability 9.0: Gluon kernels for the calls they support, portable ones for all others."""

import torch
from torch import Tensor

from lineate.call import Inputs, Options
from lineate.kernels.call import CHUNK, Call
from lineate.kernels.hopper import launch_gradients, launch_scores, launch_walks
from lineate.kernels.launching import compiling, multiprocessors
from lineate.kernels.portable import launch_gradients as portable_gradients
from lineate.kernels.portable import launch_scores as portable_scores
from lineate.kernels.portable import launch_second
from lineate.kernels.portable.launch_gradients import ChannelWork
from lineate.kernels.portable.stages import PortableStages
from lineate.kernels.stages import Around, BackwardWalk, ForwardWalk, Gradients, InWalk, Piece, Prepared


class HopperStages(PortableStages):
    """The stages of one call on Hopper."""

    def __init__(self, call: Call, late: bool = False) -> None:
        self.late = late
        self.takes_call = _takes_call(call)
        self.takes_channel = self.takes_call and _takes_channel(call)
        super().__init__(call)

    @staticmethod
    def runs_on(device: torch.device) -> bool:
        """Whether the device has compute capability 9.0."""
        if device.type != "cuda" or torch.version.hip is not None:
            return False
        return torch.cuda.get_device_capability(device) == (9, 0)

    @staticmethod
    def makes_beside(inputs: Inputs, options: Options) -> bool:
        """Whether scores are computed in parallel with a walk that leaves multiprocessors idle."""
        decay = inputs.log_decay
        return launch_scores.takes_beside(
            inputs.q, inputs.v, options.corrects, channel=decay is not None and decay.dim() == 4
        )

    def pieces(self) -> list[Piece]:
        """Return consecutive pieces of the tokens, several if decay is per channel and a walk leaves room."""
        call = self.call
        lengths = launch_scores.piece_lengths(call) if self.takes_channel else []
        if len(lengths) < 2:
            return super().pieces()
        t = call.q.shape[1]
        if compiling():  # (of a few tokens) what differs between the first piece and the others
            return [Piece(slice(0, t), self), Piece(slice(0, t), HopperStages(call, late=True))]
        pieces, end = [], 0
        for n, chunks in enumerate(lengths):
            tokens = slice(end, min(end + CHUNK * chunks, t))
            pieces.append(Piece(tokens, HopperStages(call.part(slice(0, 1), tokens), late=n > 0)))
            end = tokens.stop
        return pieces

    def choose_products(self) -> tuple[str, ...]:
        """Return products; with decay per channel a second launch computes the rows that are wild in channel.py."""
        return ("fp16", "tf32x3") if self.takes_channel else super().choose_products()

    def variant(self) -> tuple[object, ...]:
        """Return further keys of the compiled kernels, including the value columns of the walks' programs."""
        blocks = launch_walks.forward_block(self.call), launch_walks.forward_block(self.call, map_only=True)
        return self.products, *blocks, launch_walks.backward_block(self.call), self.may_work_beside

    def made_in_walk(self, keep: bool) -> InWalk:
        """Return the parts that the forward walk computes itself, with the same bits, where measured to be faster."""
        call = self.call
        if not (self.takes_call and call.q.dtype == torch.bfloat16 and not call.channel):
            return InWalk.NOTHING
        if call.corrects:
            whole = not keep and not call.sequences.cuts and launch_walks.walks_whole(call)
            return InWalk.ALL if whole else InWalk.NOTHING
        _, _, hv, K, V = call.sizes
        programs = call.sequences.walks(map_only=False, likely=True) * hv
        fits = not call.normalize_qk and K == 128 and V % 128 == 0 and programs >= multiprocessors(call.q.device)
        return InWalk.SCORES if fits else InWalk.NOTHING

    def make_head_room(self, in_walk: InWalk) -> Prepared:
        """Return the buffers that fill_head_scores fills; with marks if it runs in parallel with the walk."""
        ready = super().make_head_room(in_walk)
        if ready.T is None or self.call.sequences.cuts or not self.may_work_beside:
            return ready
        return ready._replace(made=ready.factors.new_empty(ready.factors.shape[:2], dtype=torch.int32))

    @property
    def may_work_beside(self) -> bool:
        """Whether scores and inverse are computed while a walk runs, unless it is cut."""
        call = self.call
        fits = launch_scores.takes_beside(call.q, call.v, call.corrects, call.channel)
        return self.takes_call and fits and launch_scores.leaves_room(call)

    def make_channel_room(self, for_backward: bool) -> Prepared:
        """Return the buffers that fill_channel_scores fills; for the backward, also norms."""
        norms = self.takes_channel and for_backward and self.call.normalize_qk
        return portable_scores.make_channel_room(self.call, self.looks_for_wild, for_backward, norms)

    def fill_channel_scores(self, ready: Prepared) -> None:
        """Fill the buffers of a call with decay per channel: tame rows in Gluon, then the wild ones."""
        if not self.takes_channel:
            super().fill_channel_scores(ready)
            return
        launch_scores.fill_channel_scores(self.call, ready, late=self.late)
        portable_scores.fill_channel_scores(self.call, ready, self.products[1], again=True)

    def fill_second_scores(self, writer: Prepared) -> None:
        """Fill Kw, P and M of the key that is written, where another direction is erased, as fill_channel_scores."""
        if not self.takes_channel:
            super().fill_second_scores(writer)
            return
        launch_scores.fill_channel_scores(self.call, writer, second=True)
        portable_scores.fill_channel_scores(self.call, writer, self.products[1], again=True, second=True)

    def fill_head_scores(self, ready: Prepared, for_backward: bool) -> None:
        """Fill P and T with decay per head or none."""
        if self.takes_call and self.call.q.dtype == torch.bfloat16:
            launch_scores.fill_head_scores(self.call, ready, for_backward)
        else:
            super().fill_head_scores(ready, for_backward)

    def fill_wild_rows(self, ready: Prepared) -> None:
        """Fill the rows of T from the first wild one on, with decay per head or none."""
        scores_do = self.takes_call and self.call.q.dtype == torch.bfloat16 and self.call.sizes[3] == 128
        if not scores_do:
            super().fill_wild_rows(ready)

    def walk_forward(self, ready: Prepared, walk: ForwardWalk) -> None:
        """Go from chunk to chunk and fill the buffers of the walk."""
        if self.call.corrects and ready.T is None:
            launch_walks.walk_whole(self.call, ready, walk)
        elif self.takes_call:
            launch_walks.walk_forward(self.call, ready, walk)
        else:
            super().walk_forward(ready, walk)

    def chain_segments(self, maps: Tensor) -> Tensor:
        """Return the states at the cuts, from the maps of the segments before them."""
        if self.takes_call:
            return launch_walks.chain_segments(self.call, maps)
        return super().chain_segments(maps)

    def walk_backward(self, ready: Prepared, walk: BackwardWalk) -> None:
        """Go from the last chunk to the first and fill the buffers of the walk."""
        if self.takes_call:
            launch_walks.walk_backward(self.call, ready, walk)
        else:
            super().walk_backward(ready, walk)

    def head_gradients(self, ready: Prepared, around: Around, grads: Gradients) -> None:
        """Fill the gradients with decay per head or none."""
        if self.takes_call and self.call.sizes[3] == self.call.sizes[4] == 128:
            sums = launch_gradients.fill_head_gradients(self.call, ready, around, grads)
            portable_gradients.fill_decay_gradients(self.call, ready, sums, grads)
        else:
            super().head_gradients(ready, around, grads)

    def channel_gradients(self, ready: Prepared, around: Around, grads: Gradients) -> None:
        """Fill the gradients with decay per channel: in Gluon, then in Triton those that Gluon marked as wild."""
        if not (self.takes_channel and self.call.sizes[4] == 128):
            super().channel_gradients(ready, around, grads)
            return
        if ready.second is not None:

            def fill(part: ChannelWork, own: Gradients, second: bool) -> None:
                launch_gradients.fill_channel_gradients(self.call, ready, around, part, own, second)

            launch_second.fill_both_gradients(self.call, ready, around, grads, fill)
            return
        work = portable_gradients.fill_residuals(self.call, ready, around, grads, wild=True)
        launch_gradients.fill_channel_gradients(self.call, ready, around, work, grads)
        portable_gradients.fill_channel_gradients(self.call, around, work, grads)


def _takes_call(call: Call) -> bool:
    """Whether the Gluon walks support a call: 16 bits, whole tiles, layouts for TMA, indices of 32 bits."""
    q, k, v = call.q, call.k, call.v
    t, _, hv, K, V = call.sizes
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and K in (64, 128)
        and V % 64 == 0
        and all(x.stride(3) == 1 and x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0 for x in (q, k, v))
        and max(call.sequences.slots * hv * max(64, V), v.shape[0] * t) < 2**30
        and all(x.shape[2] * x.stride(2) < 2**31 for x in (q, k, v))
    )


def _takes_channel(call: Call) -> bool:
    """Whether the Gluon scores and gradients for decay per channel support a call that the walks support."""
    decay = call.gates.log_decay
    own = (call.gates.probe, call.gates.direction) if call.gates.compared == "probe" else ()
    return (
        decay is not None
        and call.channel
        and all(x is not None and x.dtype == torch.bfloat16 for x in (call.q, *own))
        and call.sizes[3] == 128
        and decay.element_size() <= 4
    )
