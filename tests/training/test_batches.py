"""The split of documents, and batches against the naive way to make them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lineate.training.batches import Batch, Batches
from lineate.training.tokens import JoinedSpans, TokenStore, permutation
from tests.support.token_stores import END, TEXTS, make_store, view_of

# The split


@pytest.mark.cover
@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 60) | st.integers(2, 4), min_size=1, max_size=30),
    fraction=st.sampled_from([1e-6, 0.01, 0.1, 0.3, 0.5]),
    seed=st.integers(0, 5),
)
def test_split_is_a_partition(lengths, fraction, seed):
    whole = view_of(lengths)
    bounds = np.append(whole.starts, whole.n_tokens)
    store = TokenStore(Path("x"), {"vocab_size": 1, "end": 0, "tokens_crc32": 0}, whole.tokens, bounds)
    train, validation = store.split(fraction, seed)
    again = store.split(fraction, seed)
    for one, other in zip((train, validation), again, strict=True):
        assert np.array_equal(one.starts, other.starts) and np.array_equal(one.lengths, other.lengths)
    pieces = [set(view.document(i).tolist()) for view in (train, validation) for i in range(view.n_documents)]
    assert all(pieces) and train.n_documents and validation.n_documents
    assert sum(map(len, pieces)) == whole.n_tokens == len(set.union(*pieces))
    documents_of_whole = [set(whole.document(i).tolist()) for i in range(whole.n_documents)]
    assert sum(piece not in documents_of_whole for piece in pieces) in (0, 2)  # at most one document is cut in two
    wanted = max(1, round(whole.n_tokens * fraction))
    assert 0.5 * wanted <= validation.n_tokens <= 1.5 * wanted


def test_split_depends_on_the_seed_and_wants_a_fraction():
    lengths = [10] * 50
    whole = view_of(lengths)
    store = TokenStore(
        Path("x"), {"vocab_size": 1, "end": 0, "tokens_crc32": 0}, whole.tokens, np.append(whole.starts, 500)
    )
    assert len({tuple(store.split(0.1, seed)[1].starts) for seed in range(10)}) > 5
    assert (store.split(0.1, 0)[0].name, store.split(0.1, 0)[1].name) == ("train", "validation")
    for wrong in (0, -0.1, 0.6, float("nan")):
        with pytest.raises(ValueError, match=r"validation_fraction must be in \(0, 0\.5\]"):
            store.split(wrong, 0)


def test_one_text_is_cut(tmp_path):
    store, made = make_store(tmp_path, ["0123456789" * 10])
    train, validation = store.split(0.1, 0)
    assert made.decode(train.document(0)) + made.decode(validation.document(0)) == "0123456789" * 10
    assert validation.n_tokens == 10 and validation.document(0)[-1] == END and train.document(0)[0] == END


def test_permutation():
    assert permutation(6, 1, 2).tolist() == permutation(6, 1, 2).tolist()
    assert sorted(permutation(1000, 0, 0).tolist()) == list(range(1000))
    assert permutation(1, 3, 4).tolist() == [0]
    orders = {tuple(permutation(5, seed, epoch)) for seed in range(30) for epoch in range(30)}
    assert len(orders) == 120  # every order occurs
    assert permutation(8, 0, 0).tolist() == [5, 0, 7, 4, 2, 1, 3, 6]  # a stored run must continue with the same data


# Batches


def naive(view, length, rows, seed, step):
    """Return the needed epochs end to end, token by token: (id, target, whether a document begins here)."""
    stream, epoch = [], 0
    while len(stream) < (step + 1) * rows * length:
        for i in permutation(view.n_documents, seed, epoch):
            ids = view.document(i).tolist()
            stream += zip(ids, [*ids[1:], -100], [True] + [False] * len(ids), strict=False)
        epoch += 1
    part = stream[step * rows * length : (step + 1) * rows * length]
    starts = [t for t, (_, _, begins) in enumerate(part) if begins or t % length == 0]
    return [x[0] for x in part], [x[1] for x in part], [*starts, rows * length]


def assert_batch(batch, expected):
    ids, targets, bounds = expected
    assert batch.ids.tolist() == [ids] and batch.targets.tolist() == [targets]
    assert batch.cu_seqlens.tolist() == bounds
    assert {batch.ids.dtype, batch.targets.dtype, batch.cu_seqlens.dtype} == {torch.int64}


CASES = [
    ([50], 7, 3),  # one document, longer than a row
    ([7, 7, 14, 21], 7, 2),  # rows end where documents do
    ([2, 2, 2], 6, 1),  # empty documents; a row is an epoch
    ([2], 2, 5),  # five epochs in a batch
    ([3, 5, 2], 10, 4),
    ([3, 5, 3], 10, 4),  # epochs wrap inside a row
    ([1, 1, 4], 4, 2),
    ([5], 1, 1),
]


@pytest.mark.parametrize(("lengths", "length", "rows"), CASES, ids=str)
def test_batches_are_the_documents_end_to_end(lengths, length, rows):
    view = view_of(lengths)
    batches = Batches(view, length, rows, seed=3)
    for step in [0, 1, 2, 3, 7, 2, 0]:
        assert_batch(batches.batch(step), naive(view, length, rows, 3, step))


@pytest.mark.cover
@settings(max_examples=200, deadline=None)
@given(draw=st.data(), lengths=st.lists(st.integers(1, 20), min_size=1, max_size=8), seed=st.integers(0, 3))
def test_batches_are_the_documents_end_to_end_for_any(draw, lengths, seed):
    view = view_of(lengths)
    length = draw.draw(st.integers(1, view.n_tokens))
    parts = draw.draw(st.integers(1, 3))
    rows = parts * draw.draw(st.integers(1, 3))
    step = draw.draw(st.integers(0, 6))
    expected = naive(view, length, rows, seed, step)
    batches = Batches(view, length, rows, seed)
    whole = batches.batch(step)
    assert_batch(whole, expected)
    pieces = [batches.batch(step, part, parts) for part in range(parts)]
    assert_joined(pieces, whole, [False] * parts)


def assert_joined(pieces, whole, continues):
    """Check that the pieces joined are the whole; a document that continues in the next piece is one again."""
    assert torch.equal(torch.cat([piece.ids for piece in pieces], 1), whole.ids)
    assert torch.equal(torch.cat([piece.targets for piece in pieces], 1), whole.targets)
    assert [piece.continues for piece in pieces] == continues
    bounds, offset = [], 0
    for piece in pieces:
        assert piece.cu_seqlens[0] == 0 and piece.cu_seqlens[-1] == piece.ids.shape[1]
        assert (piece.cu_seqlens.diff() > 0).all()
        bounds += (piece.cu_seqlens[int(piece.continues) : -1] + offset).tolist()
        offset += piece.ids.shape[1]
    assert [*bounds, offset] == whole.cu_seqlens.tolist()


def test_views_and_stores_give_the_same_batches(tmp_path):
    store, _ = make_store(tmp_path, TEXTS * 5)
    train, validation = store.split(0.2, 1)
    for view in (store, train, validation):
        batches = Batches(view, 11, 4, 5)
        for step in range(30):
            assert_batch(batches.batch(step), naive(view, 11, 4, 5, step))


def test_an_epoch_shows_every_document_once():
    view = view_of([4, 6, 10, 20])
    batches = Batches(view, 10, 2, 0)
    seen = [sorted(torch.cat([batches.batch(2 * epoch + i).ids[0] for i in (0, 1)]).tolist()) for epoch in range(20)]
    assert seen == [list(range(40))] * 20
    assert len({tuple(batches.batch(2 * epoch).ids[0].tolist()) for epoch in range(20)}) > 5


def test_far_steps_are_exact():
    """A position beyond the integers that a float holds exactly is found without walking there."""
    view = view_of([3, 4, 6])
    step = 10**17 + 1
    batch = Batches(view, 13, 1, 0).batch(step)
    assert sorted(batch.ids[0].tolist()) == list(range(13))
    order = permutation(3, 0, step)
    assert batch.cu_seqlens.tolist() == [0, *np.cumsum(view.lengths[order])]


def test_layout_locates_any_range():
    layout = JoinedSpans(np.array([10, 0, 20]), np.array([2, 3, 1]))
    index, last, begins = layout.locate(1, 4)
    assert index.tolist() == [11, 0, 1, 2] and last.tolist() == [True, False, False, True] and begins.tolist() == [1]


def test_batch_errors():
    view = view_of([4, 6])
    with pytest.raises(
        ValueError, match="length = 11 is longer than the train data, 10 tokens in 2 documents; use length"
    ):
        Batches(view, 11, 1, 0)
    view.name = "validation"
    with pytest.raises(ValueError, match=r"validation data.*length <= 10 or a larger validation_fraction"):
        Batches(view, 11, 1, 0)
    for length, rows, message in ((0, 1, "length must be at least 1"), (1, 0, "rows must be at least 1")):
        with pytest.raises(ValueError, match=message):
            Batches(view, length, rows, 0)
    batches = Batches(view, 5, 4, 0)
    for arguments, message in [
        ((-1,), "step must be at least 0, got -1"),
        ((0, 0, 3), "rows = 4 must be a multiple of parts, got parts = 3"),
        ((0, 2, 2), r"part must be in 0\.\.1"),
        ((0, -1, 2), r"part must be in 0\.\.1"),
        ((0, 0, 0), "parts"),
    ]:
        with pytest.raises(ValueError, match=message):
            batches.batch(*arguments)


# Pieces for context parallelism


@pytest.mark.cover
@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), size=st.integers(1, 9))
def test_shards_side_by_side_are_the_batch(lengths, size):
    bounds = torch.tensor([0, *np.cumsum(lengths)])
    n = int(bounds[-1])
    batch = Batch(torch.arange(n)[None], torch.arange(n)[None] + 100, bounds)
    if n < size:
        with pytest.raises(ValueError, match=f"{n} tokens cannot be split over {size} ranks"):
            batch.shard(0, size)
        return
    shards = [batch.shard(rank, size) for rank in range(size)]
    sizes = [shard.ids.shape[1] for shard in shards]
    assert max(sizes) - min(sizes) <= 1 and min(sizes) > 0
    firsts = [int(shard.ids[0, 0]) for shard in shards]
    assert_joined(shards, batch, [first not in bounds.tolist() for first in firsts])


def test_shards_of_one_batch():
    batch = Batch(torch.arange(10)[None], torch.arange(1, 11)[None], torch.tensor([0, 2, 5, 10]))
    first, second = batch.shard(0, 2), batch.shard(1, 2)
    assert first.cu_seqlens.tolist() == [0, 2, 5] and not first.continues
    assert second.cu_seqlens.tolist() == [0, 5] and not second.continues and second.ids.tolist() == [[5, 6, 7, 8, 9]]
    middle = batch.shard(1, 3)
    assert middle.cu_seqlens.tolist() == [0, 2, 3] and middle.continues and middle.targets.tolist() == [[4, 5, 6]]
    assert middle.shard(0, 3).continues and not middle.shard(2, 3).continues
    for rank, size in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(ValueError, match="rank must be in"):
            batch.shard(rank, size)


def test_to_moves_everything():
    moved = Batch(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([0, 2]), continues=True).to("meta")
    assert {moved.ids.device.type, moved.targets.device.type, moved.cu_seqlens.device.type} == {"meta"}
    assert moved.continues
