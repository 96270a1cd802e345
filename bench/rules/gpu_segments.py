"""Times the forward of Gated DeltaNet on an NVIDIA GPU for sequences that are cut into 1, 2, ... segments.

    python -m bench.rules.gpu_segments                              all of HEADS and LENGTHS, one sequence
    python -m bench.rules.gpu_segments --heads 8 --lengths 8192     these
    python -m bench.rules.gpu_segments --company 32768              sequences that fill a call of so many tokens, packed
    python -m bench.rules.gpu_segments --kernels                    also the microseconds of each kernel, in their order

A line has the milliseconds of the whole forward for each number of segments (medians of replayed CUDA graphs, k = v =
128, bfloat16), and `*` marks the number that lineate/kernels/segments.py chooses. That file's rule was read from these
lines.
"""

import argparse
import statistics
from collections.abc import Sequence

import torch

import lineate
from bench.rules.gpu_timing import between_events, graph_replays
from bench.timing import Call
from lineate.kernels import pipeline, tape
from lineate.kernels.launching import multiprocessors
from lineate.kernels.segments import Cutting, cut_forward

HEADS = (2, 4, 8, 16, 24, 32, 48)
LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536, 131072)
SEGMENTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
SIZE = 128
LEAST = 4  # chunks of a segment
SETS = 3  # of inputs, so that the L2 cache does not hold those of the next call


def make_calls(heads: int, length: int, number: int) -> list[Call]:
    """Return calls of n sequences, packed if there are several."""
    device, t = "cuda", length * number
    bounds = torch.arange(0, t + 1, length, device=device) if number > 1 else None

    def make() -> Call:
        q, k = (torch.randn(1, t, max(heads // 2, 1), SIZE, device=device).bfloat16() for _ in range(2))
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        v = torch.randn(1, t, heads, SIZE, device=device).bfloat16()
        log_decay, beta = -torch.rand(1, t, heads, device=device), torch.rand(1, t, heads, device=device)
        return lambda: lineate.gated_delta_rule(
            q, k, v, log_decay, beta, cu_seqlens=bounds, form="chunkwise", backend="triton"
        )

    return [make() for _ in range(SETS)]


def cut(segments: int) -> None:
    """Cut every sequence into the given number of segments from now on."""
    tape.forget_tapes()
    chosen = Cutting(segments, segments, 1)
    pipeline.CUTS["forward"] = lambda *_: chosen


def time_kernels(call: Call) -> list[str]:
    """Return the name and the microseconds of each kernel of a call, in their order."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = sorted((x for x in profile.events() if x.device_time > 0), key=lambda x: x.time_range.start)
    return [f"{x.name} {x.device_time:.1f}" for x in events]


def line(heads: int, length: int, number: int, tried: Sequence[int], kernels: bool) -> str:
    """Return the line of one case."""
    calls = make_calls(heads, length, number)
    chunks = -(-length // 64)
    programs, processors = heads * SIZE // 64, multiprocessors(torch.device("cuda", 0))
    chosen = cut_forward(programs, processors, beside=True).count_segments(chunks)
    found, below = [], []
    with torch.no_grad():
        for segments in sorted({*tried, chosen}):
            if segments > 1 and chunks // segments < LEAST:
                continue
            cut(segments)
            rough = statistics.median(between_events(calls, 0.02))
            ms = statistics.median(graph_replays(calls, rough, 0.05))
            found.append(f"{segments}{'*' * (segments == chosen)}: {ms:.3f}")
            if kernels:
                below.append(f"\n    {segments}: " + ", ".join(time_kernels(calls[0])))
    return f"{number} x {length}, {heads} value heads | " + "  ".join(found) + "".join(below)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="*", default=HEADS)
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS)
    parser.add_argument("--segments", type=int, nargs="*", default=SEGMENTS)
    parser.add_argument("--company", type=int, default=0, help="tokens of a call; 0: one sequence")
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    for heads in args.heads:
        for length in args.lengths:
            number = max(1, args.company // length)
            print(line(heads, length, number, args.segments, args.kernels), flush=True)


if __name__ == "__main__":
    main()
