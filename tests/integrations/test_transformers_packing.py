"""Packed and padded rows of transformers' own models on lineate."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from lineate.integrations.transformers import MODEL_PATCHES, enable, enabled  # noqa: E402
from tests.support.transformers_models import (  # noqa: E402
    NAMES,
    apart,
    build,
    call,
    gradients,
    restarting,
    separate,
    split,
    tokens,
)

pytestmark = pytest.mark.usefixtures("disabled")
LENGTHS = (5, 1, 40, 2, 27)
UNPACKED = [family.name for family in MODEL_PATCHES if family.unpacked]


def borders(lengths):
    at = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    return {"cu_seq_lens_q": at, "cu_seq_lens_k": at, "max_length_q": max(lengths), "max_length_k": max(lengths)}


def caches(model):
    """Whether packed rows of the model make a cache, and no part of it but the linear layers has a state."""
    return not any(model.config.model_type.startswith(name) for name in UNPACKED)


@pytest.mark.cover
@pytest.mark.slow(but="values")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", NAMES)
def test_packed_rows(family, attention):
    """Rows are packed by positions, seq_idx, cu_seq_lens or several; with and without a cache; in two rows; masked."""
    model = build(family, attention)
    ids, positions = tokens(1, sum(LENGTHS)), restarting(LENGTHS)
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None].int()
    cu = borders(LENGTHS)
    with torch.no_grad():
        want = separate(model, ids, LENGTHS)
        with enabled():
            assert apart(separate(model, ids, LENGTHS), want) < 1e-5
            ways = {"position_ids": positions}, {"seq_idx": numbers}, cu, {**cu, "position_ids": positions}
            for use_cache in (False, True):
                for given in ways:
                    assert apart(call(model, ids, use_cache=use_cache, **given)[0], want) < 1e-5
            ones = torch.ones_like(ids)
            assert apart(call(model, ids, attention_mask=ones, position_ids=positions)[0], want) < 1e-5
            other, lengths = tokens(1, sum(LENGTHS), seed=3), (sum(LENGTHS) - 30, 30)
            both = torch.cat((positions, restarting(lengths)))
            want = torch.cat((want, separate(model, other, lengths)))
            assert apart(call(model, torch.cat((ids, other)), position_ids=both)[0], want) < 1e-5


def test_transformers_still_leaks(kind):
    """Without lineate, packed sequences affect each other in transformers; once this fails, our wrapper can go."""
    ids = tokens(1, sum(LENGTHS))
    with torch.no_grad():
        got, _ = call(kind, ids, position_ids=restarting(LENGTHS), use_cache=False)
        assert apart(got, separate(kind, ids, LENGTHS)) > 1e-3


def test_packed_gradients(model):
    ids, positions = tokens(1, sum(LENGTHS)), restarting(LENGTHS)
    enable()
    packed = gradients(model, lambda: call(model, ids, position_ids=positions)[0].square().mean())
    for name, want in gradients(model, lambda: separate(model, ids, LENGTHS).square().mean()).items():
        assert apart(packed[name], want) < 1e-5 * max(1.0, want.abs().max().item()), name


@pytest.mark.cover
def test_a_packed_row_is_checkpointed(kind):
    """The backward recomputes the layers of a packed row."""
    ids, positions = tokens(1, sum(LENGTHS)), restarting(LENGTHS)
    enable()
    kind.train()
    found = []
    for checkpoint in (False, True):
        if checkpoint:
            kind.gradient_checkpointing_enable()
        found.append(gradients(kind, lambda: call(kind, ids, position_ids=positions, use_cache=False)[0].sum()))
    kind.gradient_checkpointing_disable()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def states(cache, i):
    """Return the inputs of the convolution that count, and the memory, in layer i of a cache."""
    return cache.layers[i].conv_states[0][..., 1:], cache.layers[i].recurrent_states[0]


def test_a_packed_row_continues_its_last_text(kind):
    """The cached states of the linear layers are those of the last sequence alone."""
    ids = tokens(1, sum(LENGTHS))
    enable()
    with torch.no_grad():
        _, packed = call(kind, ids, position_ids=restarting(LENGTHS), use_cache=True)
        if not caches(kind):
            assert packed is None
            return
        _, alone = call(kind, ids[:, -LENGTHS[-1] :], use_cache=True)
    for i in (0, 1):
        assert all(apart(a, b) < 1e-5 for a, b in zip(states(packed, i), states(alone, i), strict=True))


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_those_of_transformers(model, side):
    """The logits of the tokens that are not padding."""
    ids, mask = tokens(3, 70), torch.ones(3, 70, dtype=torch.long)
    for row, count in ((1, 9), (2, 66)):
        mask[row, slice(0, count) if side == "left" else slice(70 - count, 70)] = 0
    at = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        want, _ = call(model, ids, attention_mask=mask, position_ids=at, use_cache=False)
        enable()
        got, _ = call(model, ids, attention_mask=mask, position_ids=at, use_cache=False)
    assert apart(got[mask.bool()], want[mask.bool()]) < 1e-5


@pytest.mark.slow(but="values")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(kind, side):
    """Rows of 30, 3, 17 and 29 tokens: prefill, two calls of several tokens, then one token, equal each row alone."""
    lengths, steps = (30, 3, 17, 29), (4, 2, 1, 1)
    rows = [tokens(1, n + sum(steps), seed=n) for n in lengths]
    enable()
    with torch.no_grad():
        want = [split(kind, row, (n, *steps)) for row, n in zip(rows, lengths, strict=True)]
        ids, mask = torch.zeros(4, 30, dtype=torch.long), torch.zeros(4, 30, dtype=torch.long)
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            where = slice(30 - n, 30) if side == "left" else slice(0, n)
            ids[i, where], mask[i, where] = row[0, :n], 1
        at = (mask.cumsum(1) - 1).clamp(min=0)
        logits, cache = call(kind, ids, attention_mask=mask, position_ids=at, use_cache=True)
        for i, n in enumerate(lengths):
            assert apart(logits[i, mask[i].bool()], want[i][0, :n]) < 1e-5
        if side == "right" and not caches(kind):
            return  # Qwen4's n-grams and GLM-5's pools of keys read the padding before the next call
        seen = 0
        for step in steps:
            part = torch.cat([row[:, n + seen : n + seen + step] for row, n in zip(rows, lengths, strict=True)])
            mask = torch.cat((mask, torch.ones(4, step, dtype=torch.long)), 1)
            at = mask.cumsum(1)[:, -step:] - 1
            logits, cache = call(kind, part, cache, attention_mask=mask, position_ids=at, use_cache=True)
            for i, n in enumerate(lengths):
                assert apart(logits[i], want[i][0, n + seen : n + seen + step]) < 1e-5
            seen += step


def test_packed_and_padded(kind):
    """Rows have several sequences, and padding at their end, which has no effect.

    Sequences do not affect each other.
    """
    lengths = ((12, 8), (6, 5, 4))
    ids, mask, at = tokens(2, 20), torch.ones(2, 20, dtype=torch.long), torch.zeros(2, 20, dtype=torch.long)
    mask[1, 15:] = 0
    at[0], at[1, :15] = restarting(lengths[0]), restarting(lengths[1])
    enable()
    with torch.no_grad():
        logits, cache = call(kind, ids, attention_mask=mask, position_ids=at)
        for i, n in enumerate((20, 15)):
            assert apart(logits[i : i + 1, :n], separate(kind, ids[i : i + 1, :n], lengths[i])) < 1e-5
        if caches(kind):
            _, alone = call(kind, ids[1:, 11:15], use_cache=True)
            assert all(apart(a[1:], b) < 1e-5 for a, b in zip(states(cache, 0), states(alone, 0), strict=True))


def test_bad_borders():
    model, ids = build("qwen3_5"), tokens(1, 10)
    enable()
    with pytest.raises(ValueError, match="cu_seq_lens_q must go up from 0 to at most"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 7, 12]))
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values must be empty for packed sequences"):
        model(ids, past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 5, 10]))


def test_packed_texts_on_a_cache_that_has_seen_tokens_are_refused(kind):
    """This holds whichever way their borders are given; without borders the same call succeeds."""
    enable()
    with torch.no_grad():
        _, cache = call(kind, tokens(1, 2), use_cache=True)
        with pytest.raises(ValueError, match=r"past_key_values must be (empty|None) for packed sequences"):
            call(kind, tokens(1, 6), cache, position_ids=torch.tensor([[2, 3, 4, 0, 1, 2]]))
        call(kind, tokens(1, 6), cache, position_ids=torch.arange(2, 8)[None])


@pytest.mark.parametrize("family", [name for name in UNPACKED if name in NAMES])
def test_models_with_sparse_layers_cache_no_packed_rows(family):
    model, ids = build(family), tokens(1, 10)
    cache = transformers.DynamicCache(config=model.config.get_text_config())
    enable()
    with pytest.raises(ValueError, match="past_key_values must be None for packed sequences in this model"):
        model(ids, past_key_values=cache, cu_seq_lens_q=torch.tensor([0, 5, 10]))
