"""The pool: rows join, leave and step in place, like states that are continued one by one."""

import pytest
import torch

from lineate.layers import TokenCache
from lineate.models import HybridLM, ModelState
from lineate.serving.engine.pool import Pool
from tests.support.serving_models import PATTERNS, VOCAB, model, prompt

patterns = pytest.mark.parametrize("pattern", PATTERNS)


@torch.no_grad()
def read(lm: HybridLM, ids: tuple[int, ...]) -> ModelState:
    return lm(torch.tensor([ids]), last_only=True).state


def same_state(got: ModelState, expected: ModelState, tolerance: float = 1e-4) -> None:
    assert (got.rows, int(got.lengths)) == (1, int(expected.lengths))
    for a, b in zip(got.layers, expected.layers, strict=True):
        assert type(a) is type(b) and a.names == b.names
        for name in a.names:
            assert a[name].dtype == b[name].dtype
            torch.testing.assert_close(a[name], b[name], rtol=tolerance, atol=tolerance)


@patterns
@torch.no_grad()
def test_rows_are_continued_as_if_alone(pattern):
    """Rows join and leave between steps, in any order; freed rows are NaN, which may not reach any result."""
    lm, pool = model(pattern), Pool(model(pattern), 3, 160, poison=True)
    generator = torch.Generator().manual_seed(1)
    states: list[ModelState] = []
    plan = ["join 5", "join 70", "step", "step", "join 1", "step", "leave 0", "step", "join 33", "step", "leave 2",
            "leave 0", "step", "join 9", "step", "step", "leave 1", "leave 0"]  # fmt: skip
    for n, action in enumerate(plan):
        what, _, number = action.partition(" ")
        if what == "join":
            states.append(read(lm, prompt(int(number), seed=n)))
            assert pool.join(states[-1]) == len(states) - 1
        elif what == "leave":
            row = int(number)
            same_state(pool.row(row), states[row])
            last = states.pop()
            moved = pool.leave(row)
            assert moved == (len(states) if row < len(states) else None)
            if moved is not None:
                states[row] = last
        else:
            ids = torch.randint(VOCAB, (len(states),), generator=generator).tolist()
            logits = pool.step(ids)
            for row, token in enumerate(ids):
                out = lm(torch.tensor([[token]]), state=states[row])
                torch.testing.assert_close(logits[row], out.logits[0, 0], rtol=1e-4, atol=1e-4)
                states[row] = out.state
        assert pool.lengths == [state.lengths for state in states]
    assert len(pool) == 0


@patterns
@torch.no_grad()
def test_forks_continue_by_themselves(pattern):
    lm, pool = model(pattern), Pool(model(pattern), 4, 64)
    state = read(lm, prompt(20))
    pool.join(state, 3)
    logits = pool.step([1, 2, 1])
    torch.testing.assert_close(logits[0], logits[2])
    assert not torch.allclose(logits[0], logits[1])
    for row, token in enumerate((1, 2, 1)):
        same_state(pool.row(row), lm(torch.tensor([[token]]), state=state).state)
    same_state(state, read(lm, prompt(20)), 0)


@patterns
def test_planned_bytes_are_allocated_bytes(pattern):
    lm = model(pattern)
    state = read(lm, prompt(20))
    for rows, capacity in ((1, 64), (3, 128), (5, 192)):
        pool = Pool(lm, rows, capacity)
        pool.join(state, rows)
        assert pool.allocated == sum(x.nbytes for x in pool.tensors) == pool.nbytes(rows, capacity)
        pool.step([0] * rows)
        assert pool.allocated == pool.nbytes(rows, capacity)
        pool.resize(rows + 1, capacity + 64)
        pool.join(state)
        assert pool.allocated == pool.nbytes(rows + 1, capacity + 64) <= pool.resize_nbytes(rows + 1, capacity + 64)
        for _ in range(rows + 1):
            pool.leave(0)
        assert pool.allocated == pool.nbytes(rows + 1, capacity + 64) - lm.state_nbytes(rows + 1, 0)


@patterns
@torch.no_grad()
def test_resizing_keeps_the_rows(pattern):
    lm, pool = model(pattern), Pool(model(pattern), 2, 64, poison=True)
    states = [read(lm, prompt(n, seed=n)) for n in (7, 50)]
    for state in states:
        pool.join(state)
    for rows, capacity in ((4, 256), (2, 64), (3, 64), (2, 512)):
        pool.resize(rows, capacity)
        assert (pool.rows, pool.capacity) == (rows, capacity)
        for row, state in enumerate(states):
            same_state(pool.row(row), state, 0)
    pool.leave(0)
    pool.resize(1, 64)
    same_state(pool.row(0), states[1], 0)
    logits = pool.step([3])
    torch.testing.assert_close(logits[0], lm(torch.tensor([[3]]), state=states[1]).logits[0, 0], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_cleared_pool_is_empty_and_works():
    lm, pool = model("GGGA"), Pool(model("GGGA"), 2, 64, poison=True)
    pool.join(read(lm, prompt(9)), 2)
    pool.clear()
    assert (len(pool), pool.lengths) == (0, [])
    state = read(lm, prompt(5))
    pool.join(state)
    torch.testing.assert_close(pool.step([1])[0], lm(torch.tensor([[1]]), state=state).logits[0, 0])


def test_a_row_is_a_copy():
    lm, pool = model("GGGA"), Pool(model("GGGA"), 2, 64)
    pool.join(read(lm, prompt(9)))
    before = pool.row(0)
    kept = [layer[name].clone() for layer in before.layers for name in layer.names]
    pool.step([1])
    pool.step([2])
    found = [layer[name] for layer in before.layers for name in layer.names]
    assert all(torch.equal(a, b) for a, b in zip(kept, found, strict=True))
    assert [layer.n for layer in before.layers if isinstance(layer, TokenCache)] == [9]


def test_errors():
    lm = model("GGGA")
    for rows, capacity in ((0, 64), (2, 0), (True, 64), (2, 1.5)):
        with pytest.raises(ValueError, match="must be an int of at least 1"):
            Pool(lm, rows, capacity)
    pool, state = Pool(lm, 2, 10), read(lm, prompt(9))
    with pytest.raises(ValueError, match=r"ids must have one entry for each of the 0 running rows, got 1"):
        pool.step([1])
    with pytest.raises(ValueError, match="at most capacity = 10 tokens, got 11"):
        pool.join(read(lm, prompt(11)))
    with pytest.raises(ValueError, match="state must have one row, got 2"):
        pool.join(ModelState.join([state, state]))
    with pytest.raises(ValueError, match="the 2 free rows, got 3"):
        pool.join(state, 3)
    pool.join(state)
    with pytest.raises(ValueError, match=r"row must be a running one, 0 .. 0, got 1"):
        pool.leave(1)
    pool.step([1])
    with pytest.raises(ValueError, match="a row has 10 tokens"):
        pool.step([1])
    with pytest.raises(ValueError, match="at least those that run, 1 and 10, got 1 and 9"):
        pool.resize(1, 9)


@patterns
@torch.no_grad()
def test_trails_keep_what_each_row_accepts(pattern):
    """Rows that keep 0, some or all tokens of a trail go on as if they had read only those."""
    lm, pool = model(pattern), Pool(model(pattern), 4, 160, poison=True)
    states = [read(lm, prompt(n, seed=n)) for n in (62, 5, 100)]
    for state in states:
        pool.join(state)
    generator = torch.Generator().manual_seed(2)
    for counts in ((0, 2, 4), (3, 3, 3), (1, 0, 2), (4, 1, 0)):
        ids = torch.randint(VOCAB, (3, 4), generator=generator)
        logits = pool.trail(ids.tolist())
        with pytest.raises(RuntimeError, match="accepted or refused"):
            pool.step([1, 1, 1])
        pool.accept(counts)
        for row, count in enumerate(counts):
            for t in range(count):
                out = lm(ids[row : row + 1, t : t + 1], state=states[row])
                torch.testing.assert_close(logits[row, t], out.logits[0, 0], rtol=1e-4, atol=1e-4)
                states[row] = out.state
            same_state(pool.row(row), states[row])
        assert pool.allocated == pool.nbytes(4, 160) - lm.state_nbytes(1, 0)
        tokens = torch.randint(VOCAB, (3,), generator=generator).tolist()
        logits = pool.step(tokens)
        for row, token in enumerate(tokens):
            out = lm(torch.tensor([[token]]), state=states[row])
            torch.testing.assert_close(logits[row], out.logits[0, 0], rtol=1e-4, atol=1e-4)
            states[row] = out.state
    with pytest.raises(RuntimeError, match="no tokens to accept"):
        pool.accept((1, 1, 1))
    with pytest.raises(ValueError, match="as many tokens for each row"):
        pool.trail([[1], [1, 2], [1]])


@torch.no_grad()
def test_weights_that_are_assigned_while_no_row_runs():
    """The next row is computed with the new weights; no memory of the old ones is read."""
    lm = model("GA")
    pool = Pool(lm, 2, 64)
    ids = torch.randint(0, VOCAB, (1, 9))
    for _ in range(2):
        state = lm(ids, last_only=True).state
        pool.join(state)
        for token in (3, 4, 5):
            found = pool.step([token])
            out = lm(torch.tensor([[token]]), state=state)
            state = out.state
            torch.testing.assert_close(found, out.logits[:, 0], rtol=1e-5, atol=1e-5)
        pool.leave(0)
        lm.load_state_dict({name: x.clone().roll(1, 0) for name, x in lm.state_dict().items()}, assign=True)
