"""The numbers of warps, stages and columns that the Triton kernels are launched with."""

import torch

from lineate.kernels.call import CHUNK, Call
from lineate.kernels.launching import next_power

# Measured on an H200 with bench/rules/gpu.py. BX and BV are the key channels and value columns of a tile. Not all
# choices work: with more stages or 32 channels the gradients are wrong (docs/kernels.md, compiler traps), so test a
# change on a GPU.
LAUNCH: dict[str, dict[str, int]] = {
    "head_gates": {"num_warps": 4},
    "head_scores": {"num_warps": 4, "num_stages": 1},
    "channel_scores": {"BX": 64, "num_warps": 4, "num_stages": 1},
    "forward_state": {"BV": 64, "num_warps": 4, "num_stages": 2},
    "backward_state": {"BV": 64, "num_warps": 4, "num_stages": 2},
    "head_residuals": {"BV": 128, "num_warps": 4, "num_stages": 1},
    "head_gradients": {"BX": 64, "BV": 64, "num_warps": 4, "num_stages": 1},
    "channel_residuals": {"BV": 128, "num_warps": 4, "num_stages": 1},
    "channel_state_gradients": {"BX": 64, "BV": 64, "num_warps": 4, "num_stages": 1},
    "channel_gradients": {"BX": 64, "num_warps": 4, "num_stages": 1},
    "second_writer": {"BV": 64, "num_warps": 4, "num_stages": 1},
    "chain": {"BV": 16, "num_warps": 8, "num_stages": 2},
}


def launch(kernel: str, **limits: int) -> dict[str, int]:
    """Return the configuration of a kernel, none of its numbers larger than `limits`."""
    chosen = dict(LAUNCH[kernel])
    for name, limit in limits.items():
        chosen[name] = min(chosen[name], limit)
    return chosen


def power(n: int) -> int:
    """Return the tile size that holds n: a power of two, at least 16."""
    return max(16, next_power(n))


def precision(call: Call) -> str:
    """Return the precision of float32 products; narrower types multiply exactly."""
    return "tf32x3" if call.q.dtype == torch.float32 else "ieee"


GROUP = 16  # chunks of a head that one program of invert_wild checks; most need nothing

# The most bytes that a walk may hold of prefetched chunks; it needs the rest of the shared memory for its results.
AHEAD_BYTES = 190_000


def launch_walk(kernel: str, call: Call) -> dict[str, int]:
    """Return the configuration of a walk; it fetches one chunk ahead only where two chunks fit."""
    _, _, _, K, V = call.sizes
    config = launch(kernel, BV=power(V))
    keys, squares, values = (3, 2, 1) if call.channel and call.corrects else (2, 1 + call.corrects, 1)
    if call.gates.direction is not None:  # and those of the second writer
        keys, squares, values = 4, 4, 1
    numbers = CHUNK * (keys * power(K) + squares * CHUNK + values * config["BV"])
    if config["num_stages"] * numbers * call.q.element_size() > AHEAD_BYTES:
        config["num_stages"] = 1
    return config


def narrow(call: Call) -> int:
    """Return the most value columns of a tile with whole keys: fewer in float32, which takes twice the memory."""
    return min(power(call.v.shape[3]), 64 if call.q.dtype == torch.float32 else 128)
