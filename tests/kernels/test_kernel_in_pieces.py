"""Calls with decay per channel in pieces: the scores of one are computed while the walk over the one before runs."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.support.cases import Shape, convert, draw, same_bits
from tests.support.rule_kernels import CHANNEL_ROWS, CHUNK, on_gpu

CHUNKWISE = {"form": "chunkwise", "backend": "triton"}


@pytest.fixture
def compare(monkeypatch):
    """Return a function that compares the bits of results and gradients of a rule before and after `change`.

    Each side is computed four times, in new calls and replayed ones, with and without states kept for the backward.
    """
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels are for compute capability 9.0")
    tape = pytest.importorskip("lineate.kernels.tape")

    def results(row: object, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        tape.forget_tapes()
        found = []
        for _ in range(4):
            leaves = {name: x.requires_grad_() for name, x in on_gpu(inputs).items()}
            made = list(row.op(**leaves, **CHUNKWISE))
            grads = torch.autograd.grad(made, list(leaves.values()), [torch.ones_like(x) for x in made])
            with torch.no_grad():
                again = row.op(**leaves, **CHUNKWISE)
            found.append([x.detach() for x in (*made, *again, *grads)])
        for each in found[1:]:
            assert all(map(same_bits, each, found[0]))
        return found[0]

    def compare_bits(row: object, inputs: dict[str, torch.Tensor], change: Callable[[], None]) -> None:
        expected = results(row, inputs)
        change()
        for x, y in zip(results(row, inputs), expected, strict=True):
            assert same_bits(x, y)

    return compare_bits


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(60, 41), (1, 70, 30), (50, 50, 1)], ids=str)
@pytest.mark.parametrize("row", CHANNEL_ROWS, ids=str)
@pytest.mark.parametrize("heads", [2, 32])
def test_pieces_have_the_bits_of_one(row, heads, lengths, monkeypatch, compare):
    """There are wild rows in every piece."""
    launches = pytest.importorskip("lineate.kernels.hopper.launch_scores")
    inputs = convert(draw(row, Shape(1, 101 * CHUNK - 7, heads, heads, 128, 128)), torch.bfloat16)
    inputs["log_decay"][:, 700::1999] = -300.0
    taken = set()

    def choose(chosen: tuple[int, ...]) -> None:
        def pieces(call: object) -> list[int]:
            taken.add(chosen)
            return list(chosen)

        monkeypatch.setattr(launches, "piece_lengths", pieces)

    choose((101,))
    compare(row, inputs, lambda: choose(lengths))
    assert taken == {lengths, (101,)}


def call(tokens: int, heads: int, **changes: object) -> SimpleNamespace:
    """Return what piece_lengths reads of a call with one sequence, on a device with 132 multiprocessors."""
    sequences = SimpleNamespace(number=1, packed=False, cuts=0, **changes)
    q = torch.empty(1, tokens, heads, 0)
    sizes = (tokens, heads, heads, 128, 128)
    gates = SimpleNamespace(direction=None)
    return SimpleNamespace(q=q, sequences=sequences, gates=gates, sizes=sizes, lone_chunks=-(-tokens // CHUNK))


@pytest.mark.parametrize("heads", [16, 24, 32, 41])
@pytest.mark.parametrize("tokens", [6081, 8192, 32768, 1_048_576])
def test_lengths_of_pieces(tokens, heads):
    """All chunks are in one piece; with few heads later pieces are longer, because more of the GPU is left for them."""
    lengths = pytest.importorskip("lineate.kernels.hopper.launch_scores").piece_lengths(call(tokens, heads))
    assert sum(lengths) == -(-tokens // CHUNK) and min(lengths) > 0
    assert len(lengths) == (2 if tokens < 16384 else 3)
    assert (lengths == sorted(lengths)) == (heads == 16)


def test_calls_in_one_piece():
    """Short calls, and walks that need most of the GPU."""
    pieces = pytest.importorskip("lineate.kernels.hopper.launch_scores").piece_lengths
    assert pieces(call(6000, 24)) == [94]
    assert pieces(call(8192, 42)) == [128]
    assert len(pieces(call(8192, 24))) == 2
    packed, cut = call(8192, 24), call(8192, 24)
    packed.sequences.packed, cut.sequences.cuts = True, 3
    assert pieces(packed) == pieces(cut) == [128]
