"""Balanced context parallelism: ranks give queries to each other, and all compare about as many pairs.

The plan is tested without processes. Four processes (gloo) then run attention with queries that move, however short
the segments are, and compare outputs and all gradients with those of one process.
"""

import math
import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lineate.call import Inputs, Request
from lineate.layers import attention, latent
from lineate.ops.rules import attend
from lineate.parallel.context import balance, carry
from lineate.parallel.context import segments as context
from lineate.parallel.context.balance import Move, Part, attention_pairs, even_parts, plan_moves
from lineate.parallel.context.workload import Source, Workload
from lineate.rule import GATED_DELTA
from lineate.training.context import context_parallel
from tests.support.segments import (
    DIFFERENCES,
    HIDDEN,
    LAYOUTS,
    RANKS,
    Cases,
    Layout,
    check,
    close,
    draw,
    make_mixer,
    on_ranks,
    received_bytes,
    run_mixer,
    run_model,
)

ROUNDING = 2e-5
"""Of float32 gradients of a model: sums over all tokens in another order (1.1e-5 on ARM, .6e-5 on x86)."""

DEFAULT = balance.LEAST_PAIRS
MOST = 1.1
"""The most pairs of a rank, in means."""


def split(bounds: Sequence[int], cuts: Sequence[int], seen: int = 0) -> list[list[Part]]:
    """Return the parts of packed sequences on ranks whose segments end at the cuts."""
    found = []
    for start, end in pairwise(cuts):
        here = [(max(a, start), min(b, end), a) for a, b in pairwise(bounds) if a < end and b > start]
        found.append([Part(last - first, first - begin + seen) for first, last, begin in here])
    return found


def evenly(lengths: list[int], ranks: int, seen: int = 0) -> list[list[Part]]:
    """Return the parts of packed sequences whose tokens are cut into segments of equal length."""
    total = sum(lengths)
    return split([0, *accumulate(lengths)], [total * rank // ranks for rank in range(ranks + 1)], seen)


def excess(pairs: list[int]) -> float:
    """Return the most pairs of a rank, in means."""
    return max(pairs) * len(pairs) / sum(pairs)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 64])
def test_one_long_sequence_is_balanced(ranks):
    parts = even_parts(2048 * ranks, ranks)
    assert parts == evenly([2048 * ranks], ranks)
    assert excess(attention_pairs(parts)) == pytest.approx((2 * ranks - 1) / ranks, abs=1e-3)
    moves = plan_moves(parts)
    assert excess(attention_pairs(parts, moves)) <= 1 + 1 / balance.ENOUGH
    for rank, _, start, end, worker in moves:  # the formula of docs/scaling.md
        assert worker == ranks - 1 - rank
        assert end - start == pytest.approx(2048 * (rank + 1 - math.sqrt(rank**2 + ranks)), abs=2)
        assert end - start <= 1024  # no rank gives or takes more than half a segment


def test_each_rank_compares_every_query_with_the_tokens_up_to_its_own():
    """The formula of the count equals a count one by one."""
    part = Part(5, 3)
    assert part.pairs() == sum(3 + i + 1 for i in range(5))
    assert part.pairs(2, 4) == (3 + 3) + (3 + 4)
    parts = [[Part(4, 0)], [Part(5, 4), Part(2, 1)]]
    assert attention_pairs(parts) == [10, 35 + 5]
    assert attention_pairs(parts, [Move(1, 0, 3, 5, 0)]) == [10 + 8 + 9, 35 + 5 - 17]


def test_packed_sequences_are_balanced_too():
    """Nothing bounds it but the size of a query: sequences that lie on one rank are shared too."""
    draws, moved, worst = random.Random(0), 0, 0.0
    for _ in range(300):
        ranks = draws.choice([2, 3, 4, 8])
        lengths = [int(2 ** draws.uniform(3, 15)) for _ in range(draws.randint(1, 40))]
        parts = evenly(lengths, ranks, seen=draws.choice([0, 100]))
        before, moves = attention_pairs(parts), plan_moves(parts)
        after = attention_pairs(parts, moves)
        assert sum(after) == sum(before)
        if max(before) - sum(before) / ranks < balance.LEAST_PAIRS:
            assert not moves
            continue
        moved, worst = moved + bool(moves), max(worst, excess(before))
        assert excess(after) <= MOST
        mean = sum(before) / ranks
        for rank in range(ranks):  # none crosses the mean, so none both gives and takes
            assert after[rank] >= mean if before[rank] > mean else after[rank] <= mean
        kept = [[part.tokens for part in own] for own in parts]
        for move in moves:  # they are always the last queries that are still there
            assert move.owner != move.worker and 0 <= move.start < move.end == kept[move.owner][move.sequence]
            kept[move.owner][move.sequence] = move.start
    assert moved > 100 and worst > 2


def test_queries_stay_where_moving_them_saves_little():
    """Whether they move depends on the shape alone: pairs above the mean, in all rows."""
    parts = even_parts(4 * 800, 4)
    largest, mean = max(attention_pairs(parts)), sum(attention_pairs(parts)) / 4
    assert largest > 1.3 * mean and largest - mean < balance.LEAST_PAIRS
    assert not plan_moves(parts) and plan_moves(parts, rows=2)
    assert not plan_moves(evenly([4 * 4000] * 4, 4))  # they are balanced without moves


def collect(sources: list[Source], tokens: list[str], states: list[list[str]], sent: list[list[str]]) -> list[str]:
    """Return the names of entries, from those of a rank's tokens, of its initial states, and of what all ranks send."""
    found = []
    for kind, start, size, rank in sources:
        entries = states[start] if kind == "state" else (tokens if kind == "new" else sent[rank])[start : start + size]
        assert len(entries) == size
        found += entries
    return found


def test_every_query_sees_its_sequence_up_to_itself(monkeypatch):
    """The workloads of all ranks, with names in place of tensors, for random sequences: empty ones and states too."""
    monkeypatch.setattr(balance, "LEAST_PAIRS", 0)
    draws, moved = random.Random(1), 0
    for _ in range(300):
        ranks, total = draws.choice([1, 2, 3, 4, 6]), draws.randint(6, 80)
        cuts = [0, *sorted(draws.sample(range(1, total), ranks - 1)), total]
        texts = sorted(draws.choices(range(1, total), k=draws.randint(0, 8)))
        parts, states, tokens, whole, continues = [], [], [], [], []
        for start, end in pairwise(cuts):
            bounds = [start, *(x for x in texts if start < x < end), end]
            continues.append(start > 0 and start not in texts)
            own, names, sequences = [], [], []
            for i, (first, last) in enumerate(pairwise(bounds)):
                goes_on = i == 0 and continues[-1]
                names.append([] if goes_on else [f"state {first} {i} {n}" for n in range(draws.choice([0, 0, 3, 20]))])
                part = Part(last - first, len(names[-1]))
                own.append(part.after(parts[-1][-1]) if goes_on else part)
                sequences.append((whole[-1][-1] if goes_on else names[-1]) + [str(n) for n in range(first, last)])
            parts.append(own)
            states.append(names)
            whole.append(sequences)
            tokens.append([str(n) for n in range(start, end)])
        moves = plan_moves(parts)
        moved += bool(moves)
        works = [Workload(rank, parts, continues, moves) for rank in range(ranks)]
        sent = [collect(work.sent, tokens[rank], states[rank], []) for rank, work in enumerate(works)]
        assert [len(entries) for entries in sent] == works[0].counts
        for rank, work in enumerate(works):
            entries = collect(work.entries, tokens[rank], states[rank], sent)
            held = [entries[start : start + n] for start, n in zip(work.starts, work.lengths, strict=False)]
            assert held == whole[rank]
            kept = [name for call in work.own_calls for name in tokens[rank][call.queries]]
            given = [name for move in work.given for name in tokens[rank][work.tokens_of(move)]]
            assert sorted(kept + given) == sorted(tokens[rank])
            for call in work.own_calls:
                queries, keys = tokens[rank][call.queries], entries[call.keys]
                if call.sequences is None:
                    assert keys[-len(queries) :] == queries
                    assert any(keys == sequence[: len(keys)] for sequence in whole[rank])
                else:
                    assert keys == [name for sequence in whole[rank][call.sequences] for name in sequence]
            taken = [name for move in work.taken for name in tokens[move.owner][works[move.owner].tokens_of(move)]]
            assert len(taken) == sum(work.takes)
            for call, move in zip(work.taken_calls, work.taken, strict=True):
                keys = entries[call.keys]
                assert keys[-move.queries :] == taken[call.queries]
                assert keys == whole[move.owner][move.sequence][: len(keys)]
    assert moved > 150


case = Cases()
SOFTMAX = ("attention", "latent")
FAST_LAYOUTS = ("rows, state", "packed, one over three ranks")
MORE = {
    "packed, one is long": Layout((0, 30, 40, 50, 60), (0, 3, 27, 41, 44, 60), state=True),
    "packed, the last is long": Layout((0, 12, 24, 36, 48), (0, 5, 10, 17, 24, 30, 48)),
    "rows, the first is long": Layout((0, 40, 43, 46, 50), state=True),
}


for mixer in SOFTMAX:
    for name, layout in (LAYOUTS | MORE).items():

        @case(f"{mixer}: {name}", len(layout.cuts) - 1, slow=name not in (*FAST_LAYOUTS, *MORE))
        def _(group, mixer=mixer, layout=layout):
            run_mixer(mixer, layout, group, torch.float32, 1e-5)

    for name in ("rows, odd lengths", "packed, one is long"):

        @case(f"{mixer}: {name}, recomputed", slow=mixer == "attention")
        def _(group, mixer=mixer, name=name):
            run_mixer(mixer, (LAYOUTS | MORE)[name], group, torch.float32, 1e-5, recompute=True)

        @case(f"wide {mixer}: {name}, bfloat16", slow=True)
        def _(group, mixer=mixer, name=name):
            run_mixer(f"wide {mixer}", (LAYOUTS | MORE)[name], group, torch.bfloat16, 0.03)

        @case(f"{mixer}: {name}, bfloat16", slow=mixer == "latent")
        def _(group, mixer=mixer, name=name):
            run_mixer(mixer, (LAYOUTS | MORE)[name], group, torch.bfloat16, 0.03)

        @case(f"{mixer}: {name}, autocast")
        def _(group, mixer=mixer, name=name):
            with torch.autocast(torch.get_default_device().type, torch.bfloat16):
                run_mixer(mixer, (LAYOUTS | MORE)[name], group, torch.float32, 0.03)

        @case(f"{mixer}: {name}, float64", slow=True)
        def _(group, mixer=mixer, name=name):
            run_mixer(mixer, (LAYOUTS | MORE)[name], group, torch.float64, 1e-12)

    @case(f"{mixer}: long enough to move by default")
    def _(group, mixer=mixer):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(balance, "LEAST_PAIRS", DEFAULT)
            assert plan_moves(even_parts(2400, RANKS), rows=2) and not plan_moves(even_parts(2300, RANKS), rows=2)
            run_mixer(mixer, Layout((0, 600, 1200, 1800, 2400)), group, torch.float32, 1e-5)

    @case(f"{mixer}: compiled", slow=True)
    def _(group, mixer=mixer):
        run_mixer(mixer, LAYOUTS["packed, one over three ranks"], group, torch.float32, 1e-5, compiled=True)


for name in (*FAST_LAYOUTS, *MORE):
    for recompute in (False, True):

        @case(f"model: {name}" + ", recomputed" * recompute, slow=name in MORE and recompute)
        def _(group, name=name, recompute=recompute):
            run_model((LAYOUTS | MORE)[name], group, torch.float32, ROUNDING, recompute)


@case("model: fully_shard, recomputed")
def _(group):
    run_model(LAYOUTS["rows, odd lengths"], group, torch.float32, ROUNDING, recompute=True, shard=True)


@case("model: float64")
def _(group):
    run_model(MORE["packed, one is long"], group, torch.float64, 1e-12)


LONG = {
    "one sequence": Layout((0, 256, 512, 768, 1024)),
    "packed, sequences of 40, 60, 500, 10 and 414": Layout((0, 256, 512, 768, 1024), (0, 40, 100, 600, 610, 1024)),
    "packed, most of them on one rank": Layout(
        (0, 256, 512, 768, 1024), (0, 250, 256, 300, 400, 512, 520, 600, 768, 1000, 1024)
    ),
}


def count_pairs(layout: Layout, mixer: str, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Return how many pairs each rank compares in a layer, and how many the segment says."""
    found = 0

    def counting(q, k, v, scale, cu_seqlens, key_bounds=None):
        nonlocal found
        queries = [q.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
        keys = [k.shape[1]] if key_bounds is None else key_bounds.diff().tolist()
        found += sum(t * n - t * (t - 1) // 2 for t, n in zip(queries, keys, strict=True))  # the last sees all n
        return attend(q, k, v, scale, cu_seqlens, key_bounds)

    attend, rank = attention.attend_new, dist.get_rank(group)
    layer = make_mixer(mixer, torch.float32)
    context_parallel(layer, group)
    start, end = layout.cuts[rank : rank + 2]
    x = draw(1, layout.cuts[-1], HIDDEN, seed=1)[:, start:end]
    segment = layer.context.segment(x, *layout.part(rank))
    with pytest.MonkeyPatch.context() as patch:
        for module in (attention, latent):
            patch.setattr(module, "attend_new", counting)
        layer(x, None, segment)
    return layer.context.gather(torch.tensor([found])).flatten().tolist(), segment.pairs


for name in LONG:

    @case(f"pairs: {name}")
    def _(group, name=name):
        """The work that runs is the work that is counted; without moves the largest rank has 30% more than the mean."""
        for mixer in SOFTMAX:
            ran, counted = count_pairs(LONG[name], mixer, group)
            if ran != counted or excess(ran) > MOST:
                DIFFERENCES.append(f"{mixer}: {ran} pairs, counted {counted}, most {excess(ran):.3f}")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(balance, "LEAST_PAIRS", 2**40)
                ran, counted = count_pairs(LONG[name], mixer, group)
            if ran != counted or excess(ran) < 1.3:
                DIFFERENCES.append(f"{mixer}: {ran} pairs without moves, counted {counted}, most {excess(ran):.3f}")


@case("1 rank: collectives", size=1)
def _(group):
    """A rank's own entries come back; on a GPU this is NCCL."""
    alone, x = context.Context(group), draw(3, 2, seed=1)
    both = alone.gather_later(x), alone.exchange_later(x, [3], [3])
    for what, got in (("gather", both[0].wait()[0]), ("exchange", both[1].wait()), ("sum", alone.scatter_sum(x[None]))):
        close(what, got, x, 0)


@case("bytes that docs/scaling.md says")
def _(group):
    """Each rank has 2 rows of 64 tokens in float32; forward runs, and again in the backward."""
    tokens, rank, received = 64, dist.get_rank(group), []
    sizes = {"attention": (2 * 2 * 10, 4 * 10, 4 * 10), "latent": (9 + 4, 3 * 10, 3 * 5)}
    with received_bytes(received):
        for name, (entry, query, output) in sizes.items():
            mixer = make_mixer(name, torch.float32)
            context_parallel(mixer, group)
            x = draw(2, tokens, HIDDEN, seed=1)
            segment = mixer.context.segment(x)
            received.clear()
            mixer(x, None, segment)[0].sum().backward()
            given = sum(move.queries for move in segment.moves if move.owner == rank)
            taken = sum(move.queries for move in segment.moves if move.worker == rank)
            forward = (RANKS - 1) * tokens * entry + taken * query + given * output
            backward = (RANKS - 1) * tokens * entry + taken * output + given * query
            expected = 4 * 2 * (forward + backward)
            if sum(received) != expected or not 0 < max(given, taken) <= tokens // 2:
                DIFFERENCES.append(f"{name}: {received}, expected {expected}; {given} given, {taken} taken")


class Events(list[str]):
    """The events of a call: exchanges that begin, waits for them, and local work."""

    def noted(self, event: str, run):
        def noting(*args, **named):
            self.append(event)
            return run(*args, **named)

        return noting

    def before_wait(self, first: str) -> list[str]:
        """Return what happens between the last exchange that begins this way and the next wait."""
        begins = len(self) - 1 - self[::-1].index(first)
        return self[begins : begins + self[begins:].index("wait")]


@case("the rule runs while the states it leaves are gathered")
def _(group):
    rank, events = dist.get_rank(group), Events()
    q, k, v = (draw(1, 20, 2, 8, seed=seed) for seed in (1, 2, 3))
    log_decay, beta = -draw(1, 20, 2, seed=4).square(), draw(1, 20, 2, seed=5).sigmoid()
    segment = context.Context(group).segment(q)
    with pytest.MonkeyPatch.context() as patch:
        gather = events.noted("gather", context.Context.gather_later)
        patch.setattr(context.Context, "gather_later", gather)
        patch.setattr(context.Pending, "wait", events.noted("wait", context.Pending.wait))
        walk = events.noted("walk", lambda inputs: attend(GATED_DELTA, inputs, Request()))
        carry.run_rule(walk, Inputs(q, k, v, log_decay=log_decay, beta=beta), segment, corrects=True)
    maps = ["gather", "walk", "gather"] if rank else ["gather", "gather", "walk"]
    if events[events.index("gather") : events.index("wait")] != maps:
        DIFFERENCES.append(f"rank {rank}: {events}")


@case("a rank attends with its own queries while outputs return to others")
def _(group):
    rank, events = dist.get_rank(group), Events()
    mixer = make_mixer("attention", torch.float32)
    context_parallel(mixer, group)
    x = draw(2, 40, HIDDEN, seed=1)
    segment = mixer.context.segment(x)
    with pytest.MonkeyPatch.context() as patch:
        exchange = events.noted("exchange", context.Context.exchange_later)
        patch.setattr(context.Context, "exchange_later", exchange)
        patch.setattr(context.Pending, "wait", events.noted("wait", context.Pending.wait))
        patch.setattr(attention, "attend_new", events.noted("attend", attention.attend_new))
        output, _ = mixer(x, None, segment)
    taken = sum(move.worker == rank for move in segment.moves)
    if events.before_wait("exchange") != ["exchange", "attend"] or events.count("attend") != 1 + taken:
        DIFFERENCES.append(f"rank {rank}: {events}")


GPU_CASES = [
    name
    for name in case.runs
    if name.endswith(("one over three ranks", "tiny", "is long", "collectives", "bfloat16", "autocast"))
]


def run_cases(folder: Path, device: str, names: list[str]) -> None:
    balance.LEAST_PAIRS = 0  # so that queries of short segments move too
    case.run(folder, device, names)


on_cpu = on_ranks(run_cases, "cpu", case.fast)
slow_on_cpu = on_ranks(run_cases, "cpu", case.slow)
on_gpu = on_ranks(run_cases, "cuda", GPU_CASES)


@pytest.mark.parametrize("name", LONG)
def test_the_document_has_these_numbers(monkeypatch, name):
    monkeypatch.setattr(balance, "LEAST_PAIRS", 0)
    parts = split(LONG[name].texts or (0, 1024), LONG[name].cuts)
    ratios = (excess(attention_pairs(parts, moves)) for moves in ((), plan_moves(parts)))
    row = " | ".join((name, *(f"{ratio:.2f}" for ratio in ratios)))
    assert f"| {row} |" in Path(__file__).parents[2].joinpath("docs/scaling.md").read_text()


@pytest.mark.parametrize("name", LAYOUTS | MORE)
def test_queries_move_in_these_cases(monkeypatch, name):
    monkeypatch.setattr(balance, "LEAST_PAIRS", 0)
    layout = (LAYOUTS | MORE)[name]
    moves = plan_moves(split(layout.texts or (0, layout.cuts[-1]), layout.cuts))
    assert bool(moves) == (name not in ("1 rank", "rows, one token each", "packed, tiny"))  # a query is too much there


@pytest.mark.cover
@pytest.mark.parametrize("name", case.fast)
def test_ranks_equal_one_process(on_cpu, name):
    check(on_cpu, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", case.slow)
def test_ranks_equal_one_process_in_more_cases(slow_on_cpu, name):
    check(slow_on_cpu, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_ranks_equal_one_process_on_a_gpu(on_gpu, name):
    check(on_gpu, name)
