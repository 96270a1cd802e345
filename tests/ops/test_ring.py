"""decode with a ring: the state is read at every token and written at every n-th, in torch and in Triton.

The oracle is the recurrent form in float64, which writes the state at every token.
"""

import pytest
import torch
from torch import Tensor, zeros

import lineate
from lineate.ops.decoding import decode
from lineate.ops.rings import Ring, ring_of
from tests.support.cases import (
    DELTA,
    GATED_DELTA,
    GATED_LINEAR,
    GATED_LINEAR_CHANNEL,
    KIMI_DELTA,
    LINEAR,
    ROWS,
    SPECIAL_ROWS,
    Shape,
    assert_within,
    budget,
    convert,
    draw,
    errors,
    interpreted,
    oracle,
    same_bits,
)
from tests.support.decode_cases import KERNEL, PATHS, inputs_of
from tests.support.ring_cases import fold, read_tokens, result, token_of

SHAPE = Shape(2, 7, 2, 4, 6, 5)


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_float64_equals_the_recurrence(row, every):
    """Over 3 n + 1 tokens, with folds when the ring is full, and at other times."""
    inputs = draw(row, SHAPE._replace(t=3 * every + 1))
    expected = oracle(row, inputs, only=())
    for fold_after in ((), (0,), (1, 3)):
        got = read_tokens(inputs, ("cpu", "torch"), every, fold_after)
        assert got.state.dtype == torch.float64
        assert_within(errors(result(got), expected), 1e-13, (row, fold_after))
        assert not got.ring.pending.any()


def within_budget(row, inputs, path, every, fold_after=(), worst_case=False, **options) -> None:
    """Compare with the oracle within the budget of decode; the GPU's exp and rsqrt err by 2^-22."""
    expected = oracle(row, inputs, only=(), **options)
    got = read_tokens(inputs, path, every, fold_after, **options)
    allowed = budget(row, inputs, expected, 1, worst_case=worst_case, **options)
    if path[0] == "cuda":
        allowed = {name: x + inputs["q"].shape[1] * 2**-22 for name, x in allowed.items()}
    assert_within(errors(result(got), expected), allowed, (row, every))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_rule(row, path):
    for every, fold_after in ((3, ()), (4, (1, 5))):
        within_budget(row, inputs_of(row, SHAPE), path, every, fold_after)


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("row", "special"), SPECIAL_ROWS, ids=str)
def test_special_inputs(row, special, path):
    """The cases are resets of -50 and -inf, zero decay, beta 0, 1 and 1.99, and an empty memory."""
    within_budget(row, inputs_of(row, Shape(1, 11, 1, 2, 6, 5), special), path, 4)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [GATED_LINEAR, DELTA, KIMI_DELTA], ids=str)
def test_sizes_scale_and_normalization(row, path):
    """k and v are 1, no powers of two, more than one block of columns; q and k have other lengths than 1."""
    for k, v in ((1, 1), (33, 66), (8, 100)):
        within_budget(row, inputs_of(row, Shape(1, 4, 1, 1, k, v)), path, 3, worst_case=k * v == 1)
    inputs = inputs_of(row, SHAPE._replace(t=5, hv=6))
    inputs["q"], inputs["k"] = 3 * inputs["q"], 0.2 * inputs["k"]
    within_budget(row, inputs, path, 2, normalize_qk=True, scale=0.7)
    within_budget(row, inputs, path, 4, scale=-2.0)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("lower_bound", [None, -4.0])
@pytest.mark.parametrize("row", [GATED_LINEAR_CHANNEL, GATED_DELTA, KIMI_DELTA], ids=str)
def test_raw_gates_have_the_result_of_gates(row, lower_bound, path):
    """A ring keeps the raw gate per channel, and makes log_decay of it again at every token."""
    inputs = inputs_of(row, SHAPE)
    gate, hv = torch.randn(inputs["log_decay"].shape, generator=torch.Generator().manual_seed(1)), SHAPE.hv
    A_log, channel = torch.linspace(-1, 1, hv), row.decay == "channel"
    dt_bias = torch.linspace(-1, 0.5, hv * SHAPE.k).view(hv, SHAPE.k) if channel else torch.linspace(-1, 0.5, hv)
    raw = {"raw_gates": True, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    given = {**inputs, "log_decay": gate}
    if row.corrects:
        given["beta"] = torch.randn(inputs["beta"].shape, generator=torch.Generator().manual_seed(2))
    log_decay, beta = lineate.rule.activate(gate, given.get("beta"), A_log, dt_bias, lower_bound=lower_bound)
    plain = {**inputs, "log_decay": log_decay, **({"beta": beta} if row.corrects else {})}
    expected = read_tokens(plain, ("cpu", "torch"), 3, (1,))
    got = read_tokens(given, path, 3, (1,), **raw)
    torch.testing.assert_close(got.output, expected.output, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(got.state, expected.state, rtol=2e-6, atol=2e-6)
    kept = got.ring.tensors.log_decay
    assert kept.shape[2:] == ((3, SHAPE.k) if channel else (3,)) and (got.ring.tensors.A_log is not None) == channel


@pytest.mark.parametrize("path", PATHS)
def test_beta_per_value_channel(path):
    inputs = inputs_of(KIMI_DELTA, SHAPE)
    inputs["beta"] = torch.rand(2, 7, 4, 5, generator=torch.Generator().manual_seed(0))
    expected = oracle(KIMI_DELTA, inputs, only=())
    assert_within(errors(result(read_tokens(inputs, path, 3)), expected), 2e-6)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("row", [LINEAR, GATED_DELTA, KIMI_DELTA], ids=str)
def test_rows_of_all_ages_in_slots(row, path):
    """Rows begin at different tokens, lie in any slots, and some are idle; each has the bits that it has alone."""
    device, backend = path
    inputs = inputs_of(row, SHAPE._replace(b=3, t=8), texts=6)
    begins, places, every = (0, 2, 5), (4, 1, 2), 3
    pool = inputs["state"].to(device).clone()
    pool[[0, 3]] = torch.nan
    before = pool.clone()
    ring = Ring(**token_of(inputs, 0, device), state=pool, every=every)
    for name in ("keys", "writes", "log_decay"):  # entries that are not there are not read
        if getattr(ring.tensors, name) is not None:
            getattr(ring.tensors, name).fill_(torch.nan)
    outputs = []
    for i in range(8):
        slots = torch.tensor([slot if i >= begin else -1 for slot, begin in zip(places, begins, strict=True)])
        token = token_of(inputs, i, device)
        outputs.append(decode(**token, state=pool, slots=slots.to(device), ring=ring, backend=backend).cpu())
    output = torch.cat(outputs, 1)
    assert ring.pending.tolist() == [0, (8 - 2) % 3, (8 - 5) % 3, 0, 8 % 3, 0]
    assert same_bits(pool[[0, 3, 5]].cpu(), before[[0, 3, 5]].cpu())
    fold(ring, path, torch.tensor([4, -1, 2, 1]).to(device))
    assert ring.pending.tolist() == [0] * 6 and same_bits(pool[[0, 3, 5]].cpu(), before[[0, 3, 5]].cpu())
    for n, (begin, slot) in enumerate(zip(begins, places, strict=True)):
        assert not output[n, :begin].any()
        own = {name: x[n : n + 1, begin:] for name, x in inputs.items() if name != "state"}
        alone = read_tokens({**own, "state": before[slot : slot + 1].cpu()}, path, every)
        assert same_bits(alone.output[0], output[n, begin:]) and same_bits(alone.state[0], pool[slot].cpu())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_bfloat16_states_err_less_than_without_a_ring(row, rounding, path):
    """The state is rounded at folds alone; entries are rounded once, to the dtype of the state.

    Without a ring, the errors after t tokens are at most u (|S_1| + ... + |S_t|) (test_narrow_states.py). With one,
    those of a fold are u |S|, and of an entry u |r|, at most u (|S'_i| + |S_i|) for a unit key.
    """
    t, u = 10, 2**-8 if rounding == "nearest" else 2**-7
    inputs = inputs_of(row, SHAPE._replace(t=t))
    for name in ("q", "k"):
        inputs[name] = torch.nn.functional.normalize(inputs[name], dim=-1)
    narrow = {**inputs, "state": inputs["state"].bfloat16()}
    expected = oracle(row, {**inputs, "state": narrow["state"].double()}, only=())
    seeds = torch.tensor([5, 2**40 + 9]) if rounding == "stochastic" else None
    got = read_tokens(narrow, path, 4, seeds=seeds)
    assert got.state.dtype == torch.bfloat16
    size = max(float(inputs["state"].norm()), float(expected.state.norm()), float(inputs["v"].norm()))
    folds = 1 + t // 4
    assert float((got.state.double() - expected.state).norm()) <= u * size * (folds + 1)
    assert float((got.output.double() - expected.output).norm()) <= u * size * (folds + 1)
    kept = got.ring.tensors.writes.dtype
    assert kept == (torch.bfloat16 if row.corrects else torch.float32)


@pytest.mark.parametrize("path", KERNEL)
def test_a_fold_rounds_with_the_seeds_of_its_token(path):
    """The kernel and torch draw the same numbers, from the seed of the token that fills the ring."""
    inputs = inputs_of(LINEAR, Shape(3, 4, 1, 2, 8, 6))
    inputs["state"] = inputs["state"].bfloat16()
    seeds = torch.tensor([7, -3, 2**35])
    ours, theirs = read_tokens(inputs, path, 2, seeds=seeds), read_tokens(inputs, ("cpu", "torch"), 2, seeds=seeds)
    assert (ours.state != theirs.state).float().mean() < 0.02


def test_tokens_can_be_taken_back():
    inputs = inputs_of(GATED_DELTA, SHAPE)
    four = {name: x if name == "state" else x[:, :4] for name, x in inputs.items()}
    expected = read_tokens(four, ("cpu", "torch"), 5)
    state = inputs["state"].clone()
    ring = Ring(**token_of(inputs, 0), state=state, every=5)
    for i in (0, 1, 6, 5):
        decode(**token_of(inputs, i), state=state, ring=ring)
    for slot in range(2):
        ring.take_back(slot, 2)
    outputs = [decode(**token_of(inputs, i), state=state, ring=ring) for i in (2, 3)]
    assert same_bits(torch.cat(outputs, 1), expected.output[:, 2:])
    ring.fold()
    assert same_bits(state, expected.state)
    with pytest.raises(ValueError, match=r"^tokens must be between 0 and the 0 that slot 0 has read since"):
        ring.take_back(0, 1)


def test_what_a_ring_says_of_itself():
    """A bfloat16 state of heads of 128 has .61 of the bytes with a decay per head, .63 with a raw gate per channel."""

    def ring(row, every: int, dtype=torch.bfloat16, state=torch.bfloat16) -> Ring:
        inputs = convert(draw(row, Shape(1, 1, 2, 4, 128, 128)), dtype)
        return Ring(**{**inputs, "state": inputs["state"].to(state)}, every=every)

    assert 0.58 < ring(GATED_DELTA, 8).traffic.ratio < 0.62
    assert ring(KIMI_DELTA, 8).traffic.ratio < 0.63
    assert ring(KIMI_DELTA, 8, torch.float32, torch.float32).traffic.ratio < 0.63
    assert not ring(GATED_DELTA, 1).traffic.saves
    text = str(ring(GATED_DELTA, 8))
    assert text.startswith("gated_delta_rule: the state is written every 8 tokens; a token moves ")
    assert "fewer bytes, which is not a time" in text and "saves no bytes" in str(ring(GATED_DELTA, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_inputs_and_other_dtypes(dtype):
    """Keys and gates are kept as they came; q, k and v of other dtypes are promoted as without a ring."""
    inputs = convert(draw(KIMI_DELTA, SHAPE), dtype)
    expected = oracle(KIMI_DELTA, inputs, only=())
    got = read_tokens(inputs, ("cpu", "torch"), 3)
    assert got.ring.tensors.keys.dtype == got.ring.tensors.log_decay.dtype == dtype
    assert got.output.dtype == dtype and got.ring.tensors.writes.dtype == torch.float32
    assert_within(errors(result(got), expected), {"output": 2.0**-8, "state": 3e-6})
    mixed = {**inputs, "q": inputs["q"].float()}
    assert read_tokens(mixed, ("cpu", "torch"), 3).output.dtype == dtype


# wrong calls

RIGHT = inputs_of(GATED_DELTA, Shape(2, 1, 2, 4, 6, 5))
TOKEN = token_of(RIGHT, 0)


def make(**changed: object) -> Ring:
    return Ring(**{**TOKEN, "state": zeros(3, 4, 6, 5), **changed})


WRONG = [
    ({"every": 0}, r"^every must be an int between 1 and 16, the tokens of a ring, got 0$"),
    ({"every": 17}, r"^every must be an int between 1 and 16"),
    ({"every": True}, r"^every must be an int between 1 and 16"),
    ({"state": zeros(3, 4, 5, 6)}, r"^state must have shape \(n_slots, hv, k, v\)"),
    ({"log_decay": -torch.ones(2, 1, 3)}, r"^log_decay must have shape"),
    ({n: torch.cat((x, x), 1) for n, x in TOKEN.items()}, r"^q must have one token a row, b 1 h k, .* got t = 2$"),
    ({"raw_gates": True}, r"^raw_gates=True with log_decay needs A_log"),
    ({"A_log": zeros(4)}, r"^A_log is for raw gates, got raw_gates=False"),
    ({"raw_gates": True, "A_log": zeros(4), "lower_bound": 3.0}, r"^lower_bound must be"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_wrong_rings(changed, message):
    with pytest.raises(ValueError, match=message):
        make(**changed)


def test_wrong_slots_and_flags():
    with pytest.raises(TypeError, match=r"^normalize_qk must be"):
        make(normalize_qk=3)
    ring = make()
    decode(**TOKEN, state=ring.state, slots=torch.tensor([0, 2]), ring=ring)
    for empty in (ring.fold, ring.reset):
        with pytest.raises(TypeError, match=r"^slots must be a torch.Tensor or None, got list"):
            empty([1])
        for wrong, message in (
            (torch.tensor([0.5]), r"^slots must be int32 or int64, got float32"),
            (torch.tensor([True, False, True]), r"^slots must be int32 or int64, got bool"),
            (torch.tensor(1), r"^slots must have shape \(rows,\), got \(\)"),
            (torch.tensor([0, 3]), r"^slots must be below n_slots = 3, got 3"),
            (torch.tensor([2, 2]), r"^slots must differ between rows, got 2"),
        ):
            with pytest.raises(ValueError, match=message):
                empty(wrong)
        empty(torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^rounding='stochastic' is for a bfloat16 state, got float32"):
        ring.fold(seeds=torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"^seeds must have shape \(rows,\) = \(3,\), got \(1,\)"):
        make(state=zeros(3, 4, 6, 5, dtype=torch.bfloat16)).fold(seeds=torch.tensor([1]))
    assert ring.pending.tolist() == [1, 0, 1] and not ring.state.any()


def test_other_parameters_of_a_raw_gate_are_refused():
    """A ring applies them again to its entries, so that a call with others would mix two gates."""
    token = token_of(inputs_of(KIMI_DELTA, Shape(2, 1, 2, 4, 6, 5)), 0)
    pool, A_log, dt_bias = zeros(2, 4, 6, 5), torch.linspace(-1, 1, 4), zeros(4, 6)
    ring = Ring(**token, state=pool, raw_gates=True, A_log=A_log, dt_bias=dt_bias)
    call = {**token, "state": pool, "ring": ring, "raw_gates": True, "A_log": A_log, "dt_bias": dt_bias}
    decode(**call)
    for changed, message in (
        ({"A_log": A_log - 1}, r"^A_log must be that of the call that the ring was made for, got other values"),
        ({"dt_bias": None}, r"^dt_bias must be that of the .*, of shape \(4, 6\), got None; make another ring"),
        ({"dt_bias": zeros(4)}, r"^dt_bias must be that of the .*, of shape \(4, 6\), got \(4,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            decode(**{**call, **changed})
    decode(**{**call, "A_log": A_log.clone(), "dt_bias": dt_bias.flatten()})
    assert ring.pending.tolist() == [2, 2]


def test_rules_of_the_general_row_have_no_ring():
    x = torch.ones(1, 1, 1, 4)
    with pytest.raises(ValueError, match=r"^ring must be one of a rule with one key a token \(linear_attention, "):
        inputs = lineate.call.Inputs(q=x, k=x, v=x, erase=x, write=x, log_decay=-x[..., 0], state=zeros(1, 1, 4, 4))
        ring_of(inputs, 8, lineate.call.RawGates(False), False)


def test_wrong_calls():
    pool, slots = zeros(3, 4, 6, 5), torch.tensor([0, 2])
    ring = Ring(**TOKEN, state=pool)
    call = {**TOKEN, "state": pool, "slots": slots, "ring": ring}
    before = pool.clone()

    def refuses(message: str, kind: type[Exception] = ValueError, **changed: object) -> None:
        with pytest.raises(kind, match=message):
            decode(**{**call, **changed})
        assert torch.equal(pool, before) and not ring.pending.any()

    two = {name: torch.cat((x, x), 1) for name, x in TOKEN.items()}
    refuses(r"^ring takes one token a row, got t = 2; call ring.fold\(\)", **two)
    refuses(r"^start_slots must be None with a ring", start_slots=slots)
    refuses(r"^state must be the pool that the ring was made for, got other memory", state=pool.clone())
    refuses(r"^state must be the pool that the ring was made for, torch.float32 \(3, 4", state=zeros(4, 4, 6, 5))
    refuses(r"^ring must be one of delta_rule, got one of gated_delta_rule; make it with lineate.Ring", log_decay=None)
    refuses(r"^k must be as in the call that the ring was made for", **{n: TOKEN[n].bfloat16() for n in "qkv"})
    refuses(r"^ring must be a lineate.Ring or None, got int", TypeError, ring=3)
    refuses(r"^slots must be below n_slots = 3", slots=torch.tensor([0, 3]))
    refuses(r"^log_decay must be", log_decay=TOKEN["log_decay"].abs())
    decode(**call)
    assert ring.pending.tolist() == [1, 0, 1] and torch.equal(pool, before)


@interpreted
def test_what_the_kernel_does_not_do():
    wide = inputs_of(GATED_DELTA, Shape(1, 1, 1, 1, 257, 2))
    ring = Ring(**wide)
    with pytest.raises(ValueError, match=r"^backend='triton' cannot serve this call: it takes k and v up to 256"):
        decode(**wide, ring=ring, backend="triton")


# natively


def in_bfloat16(row, shape: Shape, texts: int | None = None) -> dict[str, Tensor]:
    return {name: x.cuda() for name, x in convert(draw(row, shape, texts=texts), torch.bfloat16).items()}


@pytest.mark.gpu
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_native_model_sizes(row, state):
    """Inputs in bfloat16 and heads of 128 or 64, next to the recurrence in float64.

    The GPU's exp and rsqrt are approximations to about 2^-22, and each token's errors stay in the memory.
    """
    shapes = [Shape(3, 19, 2, 4, 128, 128)]
    if row in (GATED_DELTA, KIMI_DELTA):
        shapes.append(Shape(2, 5, 1, 3, 64, 128))
    for shape in shapes:
        inputs = convert(draw(row, shape), torch.bfloat16)
        inputs["state"] = inputs["state"].to(state)
        expected = oracle(row, {**inputs, "state": inputs["state"].double()}, only=())
        got = read_tokens(inputs, ("cuda", "triton"), 8, (4,))
        limit = 2.0**-7 if state is torch.bfloat16 else 2e-6 + shape.t * 2**-22
        assert_within(errors(result(got), expected), {"output": 2.0**-7, "state": limit}, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("row", [GATED_DELTA, KIMI_DELTA], ids=str)
def test_in_a_cuda_graph(row):
    """A graph of one token, replayed for rows of different ages and an idle one, has the bits of eager calls."""
    inputs = in_bfloat16(row, Shape(4, 1, 2, 4, 128, 128), texts=9)
    pool, slots = inputs["state"].bfloat16(), torch.tensor([5, -1, 2, 0], device="cuda")
    token, first = {name: x for name, x in inputs.items() if name != "state"}, pool.clone()
    rings = [Ring(**token, state=x, every=4) for x in (pool, first)]
    for ring, x in zip(rings, (pool, first), strict=True):  # compiles; slot 5 is two tokens older
        decode(**token, state=x, slots=torch.tensor([5, -1, -1, -1], device="cuda"), ring=ring)
        decode(**token, state=x, slots=torch.tensor([5, -1, -1, -1], device="cuda"), ring=ring)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = decode(**token, state=pool, slots=slots, ring=rings[0])
    for turn in range(11):
        graph.replay()
        assert same_bits(output, decode(**token, state=first, slots=slots, ring=rings[1])), turn
        assert same_bits(pool, first) and torch.equal(rings[0].pending, rings[1].pending)
        for x in token.values():
            x.copy_(x.roll(1, 0))
    assert rings[0].pending.tolist()[5] == (2 + 11) % 4
