"""The layout of tokens in chunks: every token has one slot, in order, and comes back from it."""

import pytest
import torch

from lineate.memory.chunks import check_chunk, cut_runs, lay_out, walk_places
from tests.support.cases import bounds

CASES = [
    # lengths, positions; equal lengths are rows of a batch, others are packed
    ((7, 7), None),
    ((8, 8, 8), None),
    ((7, 7), (3, 0)),
    ((1,), (3,)),
    ((5, 0, 13, 1, 4), None),
    ((5, 0, 13, 1, 4), (3, 2, 0, 1, 3)),
]
CHUNK = 4


@pytest.mark.parametrize("even", [None, False, True])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(("lengths", "positions"), CASES)
def test_tokens_come_back(lengths, positions, known, even):
    packed = len(set(lengths)) > 1
    rows, b, t = len(lengths), 1 if packed else len(lengths), sum(lengths) if packed else lengths[0]
    x = torch.randn(b, t, 2, 3)
    given = positions if known or positions is None else torch.tensor(positions)
    layout = lay_out(x, given, CHUNK, bounds(lengths) if packed else None, even)
    cells = layout.cells(x)  # cells h chunk d
    assert cells.shape == (sum(layout.sizes), 2, CHUNK, 3)
    assert layout.tokens(cells, b, t).equal(x)
    assert int((cells != 0).any(3).any(1).sum()) == b * t  # all other slots are 0

    ends = [(0 if positions is None else positions[row]) + n for row, n in enumerate(lengths)]
    assert layout.position.tolist() == [end % CHUNK for end in ends]
    assert layout.lengths.tolist() == list(lengths)
    assert layout.order[layout.rank].tolist() == list(range(rows))
    assert int(layout.complete.sum()) == sum(end // CHUNK for end in ends)
    ordered = layout.order.tolist()
    assert layout.first.tolist() == [ends[row] < CHUNK for row in ordered]
    for row, tail, begun in zip(ordered, layout.tail.tolist(), layout.begun.tolist(), strict=True):
        if lengths[row] and ends[row] % CHUNK:
            first = sum(lengths[:row]) if packed else 0
            last = x[0 if packed else row, first + lengths[row] - 1]
            assert begun and cells[tail, :, ends[row] % CHUNK - 1].equal(last)
    if layout.filled is not None and not layout.even:
        near = layout.near_cells(x)
        assert near.where(layout.filled[:, None, :, None], 0).equal(cells)
        assert [any(flags) for flags in layout.filled.tolist()] == [True] * len(layout.filled)
        assert [flag for flags in layout.ends for flag in flags] == layout.complete.tolist()


def test_places_of_a_walk():
    base, counts, on_host = walk_places((3, 3, 1), torch.device("cpu"))
    assert (base.tolist(), counts.tolist(), on_host) == ([0, 3, 6], [3, 2, 2], [3, 2, 2])
    assert base.dtype == counts.dtype == torch.int32


@pytest.mark.parametrize(("tokens", "position"), [(0, 0), (1, 0), (4, 0), (3, 2), (25, 3), (8, 1)])
def test_runs_cover_all_tokens(tokens, position):
    runs = cut_runs(tokens, position, CHUNK, 1)
    x = torch.randn(2, tokens, 3, 5)
    back = torch.zeros_like(x)
    for run in runs:
        run.store(back, run.cells(x, x.dtype))
    assert back.equal(x)
    assert sum(run.n for run in runs if run.ends) == (position + tokens) // CHUNK


@pytest.mark.parametrize(("chunk", "error"), [(0, ValueError), (True, TypeError), (2.0, TypeError)])
def test_a_chunk_is_a_number_of_tokens(chunk, error):
    with pytest.raises(error, match="chunk must be"):
        check_chunk(chunk)
