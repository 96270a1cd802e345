"""Context parallelism: ranks that each hold a segment equal one process that holds all, in outputs and all gradients.

Queries stay on their ranks here, as the segments are short; test_context_balance.py has the cases in which they move.
Four processes (gloo) are started once and run every fast case, and once for the slow ones.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lineate.training.context import context_parallel
from tests.support.segments import (
    DIFFERENCES,
    HIDDEN,
    LAYOUTS,
    MIXERS,
    RANKS,
    Cases,
    check,
    close,
    draw,
    make_mixer,
    make_model,
    on_ranks,
    received_bytes,
    run_mixer,
    run_model,
)

case = Cases()
FAST_LAYOUT = "packed, one over three ranks"
FAST_TOO = {
    "linear": "2 ranks", "kimi": "rows, state", "attention": "packed, ends at the edges", "latent": "packed, tiny",
}  # fmt: skip
"""A second fast layout of some mixers; the other combinations are slow."""
MANY_CHUNKS = ("kimi: rows, many chunks", "linear: rows, many chunks")


for mixer in MIXERS:
    for name, layout in LAYOUTS.items():
        few = len(layout.cuts) - 1 < RANKS and mixer not in ("linear", "kimi", "attention")
        if few or ("no convolution" in mixer and not name.startswith("packed, one")):
            continue

        fast = name in (FAST_LAYOUT, FAST_TOO.get(mixer)) or f"{mixer}: {name}" in MANY_CHUNKS

        @case(f"{mixer}: {name}", len(layout.cuts) - 1, slow=not fast)
        def _(group, mixer=mixer, layout=layout):
            run_mixer(mixer, layout, group, torch.float32, 1e-5)

    @case(f"{mixer}: recomputed", slow=True)
    def _(group, mixer=mixer):
        run_mixer(mixer, LAYOUTS["packed, one over three ranks"], group, torch.float32, 1e-5, recompute=True)

    @case(f"{mixer}: bfloat16", slow=mixer not in ("gated delta", "attention"))
    def _(group, mixer=mixer):
        run_mixer(mixer, LAYOUTS["rows, odd lengths"], group, torch.bfloat16, 0.03)


for mixer in ("gated delta", "attention"):

    @case(f"{mixer}: compiled", slow=True)
    def _(group, mixer=mixer):
        run_mixer(mixer, LAYOUTS["packed, one over three ranks"], group, torch.float32, 1e-5, compiled=True)


for name in ("rows, state", "packed, one over three ranks", "packed, ends at the edges", "packed, tiny"):
    for recompute in (False, True):

        @case(f"model: {name}" + ", recomputed" * recompute, slow=recompute != (name == "packed, tiny"))
        def _(group, name=name, recompute=recompute):
            run_model(LAYOUTS[name], group, torch.float32, 1e-5, recompute)


@case("model: fully_shard, recomputed")
def _(group):
    run_model(LAYOUTS["packed, one over three ranks"], group, torch.float32, 1e-5, recompute=True, shard=True)


@case("model: float64")
def _(group):
    run_model(LAYOUTS["packed, one over three ranks"], group, torch.float64, 1e-12)


@case("two forwards, then both backwards, recomputed", slow=True)
def _(group):
    """Each recomputation uses its own segment, not the latest one."""
    rank, totals = dist.get_rank(group), []
    model = make_model(torch.float64)
    context_parallel(model, group)
    for block in model.layers:
        block.recompute = True
    layouts = [LAYOUTS[x] for x in ("packed, one over three ranks", "packed, ends at the edges")]
    for together in (True, False):
        losses = []
        for layout in layouts:
            start, end = layout.cuts[rank : rank + 2]
            cu_seqlens, continues = layout.part(rank)
            ids = torch.arange(start, end)[None]
            losses.append(model(ids, cu_seqlens=cu_seqlens, continues=continues).logits.square().sum())
            if not together:
                losses[-1].backward()
        if together:
            sum(losses).backward()
        totals.append([x.grad.clone() for x in model.parameters()])
        model.zero_grad()
    for got, expected in zip(*totals, strict=True):
        close("gradient", got, expected, 1e-12)


@case("bytes that docs/scaling.md says")
def _(group):
    """Each rank has 2 rows of 9 tokens in float32; forward runs, and again in the backward."""
    received: list[int] = []
    h, hv, k, v = 2, 4, 8, 6
    halo = 4 * 2 * 3 * (2 * h * k + hv * v)
    expected = {
        "linear": 4 * 2 * hv * k * (1 + v + 1) + halo,
        "gated linear": 4 * 2 * hv * k * (1 + v) + halo,
        "gated delta": 4 * 2 * hv * k * (k + v) + halo,
        "attention": 4 * 2 * (2 * 2 * 10) * 9,
        "latent": 4 * 2 * (9 + 4) * 9,
    }
    with received_bytes(received):
        for name, each in expected.items():
            mixer = make_mixer(name, torch.float32)
            context_parallel(mixer, group)
            received.clear()
            mixer(draw(2, 9, HIDDEN, seed=1))[0].sum().backward()
            if sum(received) != (RANKS - 1) * (2 * each + 40):
                DIFFERENCES.append(f"{name}: {received}, expected {(RANKS - 1) * (2 * each + 40)}")


@case("what is not finite stays in its text")
def _(group):
    """The sequence of rank 3 began on rank 2, after one that is not finite."""
    layout, rank = LAYOUTS["packed, one over three ranks"], dist.get_rank(group)
    start, end = layout.cuts[rank : rank + 2]
    for name in ("linear", "gated linear", "gated delta"):
        mixer = make_mixer(name, torch.float32)
        context_parallel(mixer, group)
        x = draw(1, layout.cuts[-1], HIDDEN, seed=1)
        x[:, 5] = torch.nan
        mine = x[:, start:end].clone().requires_grad_()
        output, _ = mixer(mine, None, mixer.context.segment(mine, *layout.part(rank)))
        output.sum().backward()
        for what, found in (("output", output), ("gradient", mine.grad)):
            if bool(found.isfinite().all()) != (rank == 3):
                DIFFERENCES.append(f"{name}: {what} of rank {rank}: {found}")


@case("errors")
def _(group):
    rank = dist.get_rank(group)
    model = make_model(torch.float32)
    with pytest.raises(ValueError, match="continues=True needs context parallelism"):
        model(torch.ones(1, 3, dtype=torch.long), continues=True)
    with pytest.raises(ValueError, match=r"model must have mixers of lineate\.layers, got Linear"):
        context_parallel(nn.Linear(2, 2), group)
    context_parallel(model, group)
    ids, bounds = torch.ones(1, 3, dtype=torch.long), torch.tensor([0, 3])
    for arguments, message in (
        ({"labels": ids}, "labels cannot be used under context parallelism"),
        ({"attention_mask": ids}, "attention_mask cannot be used under context parallelism"),
        ({"cu_seqlens": bounds}, "continues must be given with cu_seqlens"),
        ({"cu_seqlens": bounds, "continues": True}, "continues must be False on rank 0"),
        ({"cu_seqlens": bounds, "continues": False, "state": 3}, None),
    ):
        with pytest.raises(ValueError if message else TypeError, match=message):
            model(ids, **arguments)
    with pytest.raises(ValueError, match=r"the same b on all ranks, .* got b = 1, 2, 2, 2"):
        model(ids if rank == 0 else ids.expand(2, -1))
    with torch.no_grad():
        state = model(torch.ones(1, 6, dtype=torch.long), cu_seqlens=torch.tensor([0, 2, 6]), continues=False).state
        with pytest.raises(ValueError, match=r"as many tokens in every row .* got \[2, 4\]"):
            model.context.segment(ids.expand(2, -1), None, False, state.lengths)
        mixer = make_mixer("attention", torch.float32)
        context_parallel(mixer, group)
        x, bounds = draw(1, 6, HIDDEN, seed=1), torch.tensor([0, 2, 6])
        state = mixer(x, None, mixer.context.segment(x, bounds, False))[1]
        with pytest.raises(
            ValueError, match=r"as many tokens as the segment was told, \[0, 0\], got \[2, 4\]; pass seen="
        ):
            mixer(x, state, mixer.context.segment(x, bounds, False))


GPU_CASES = [
    name for name in case.runs if name.endswith(("many chunks", "one over three ranks", "tiny", "1 rank", "bfloat16"))
]


def run_cases(folder: Path, device: str, names: list[str]) -> None:
    case.run(folder, device, names)


on_cpu = on_ranks(run_cases, "cpu", case.fast)
slow_on_cpu = on_ranks(run_cases, "cpu", case.slow)
on_gpu = on_ranks(run_cases, "cuda", GPU_CASES)


@pytest.mark.cover
@pytest.mark.parametrize("name", case.fast)
def test_ranks_equal_one_process(on_cpu, name):
    check(on_cpu, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(case.slow))
def test_ranks_equal_one_process_in_more_cases(slow_on_cpu, name):
    check(slow_on_cpu, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_ranks_equal_one_process_on_a_gpu(on_gpu, name):
    check(on_gpu, name)
