"""Lower bounds of times: operations over the rate of matrix products, bytes over the rates at which they arrive.

Bytes come from the memory, at its bandwidth, and from other ranks, at the rate of the link between them.
"""

import math
from dataclasses import dataclass, field, replace

import torch

from lineate.planning.communication import Received, decode_received, prefill_received, training_received
from lineate.planning.compute import decode_bytes, plan_flops, prefill_bytes, touched_weights
from lineate.planning.memory import MemoryPlan, plan_memory
from lineate.planning.models import WHOLE, Model, Split, check_size

NOTHING = Received()
"""The received bytes of a single rank: none."""


@dataclass(frozen=True)
class Hardware:
    """The peak rates of a machine, from its vendor's figures for dense products."""

    name: str
    """Its name in tables."""
    memory_bytes: int
    """Bytes of its memory."""
    bandwidth: float
    """Bytes a second between the memory and the chip."""
    matrix_rate: dict[str, float] = field(hash=False)
    """Operations a second by dtype: float32 (tf32 where there is one), bfloat16, float16, float8, int8."""
    cache_bytes: int = 0
    """Bytes of cache on the chip; this amount may stay there between steps and is not counted as moved."""
    notes: str = ""
    """Conditions of its numbers, such as the kind of memory and the power."""
    link: float = math.inf
    """Bytes a second that it receives from others of its node; inf: communication takes no time."""
    network: float = math.inf
    """Bytes a second that it receives from other nodes."""
    node: int = 8
    """How many of them are in a node."""

    def rate(self, dtype: torch.dtype) -> float:
        """Return the rate of a dtype, or that of the next wider one that has a rate."""
        name = str(dtype).removeprefix("torch.").replace("float8_e4m3fn", "float8")
        wider = {"float8": "bfloat16", "int8": "bfloat16", "bfloat16": "float16", "float16": "float32"}
        while name not in self.matrix_rate and name in wider:
            name = wider[name]
        if name not in self.matrix_rate:
            raise ValueError(f"matrix_rate of {self.name} must have {name}, got {', '.join(self.matrix_rate)}")
        return self.matrix_rate[name]

    def link_rate(self, ranks: int, stride: int = 1) -> float:
        """Return the bytes per second that one of `ranks` ranks receives from the others.

        Ranks fill one node after another, and every stride-th is of this group. Data that all ranks of the group in a
        node need is received over all their network links, each byte once, and distributed inside the node.
        """
        if ranks * stride <= self.node:
            return self.link
        return min(self.link, max(1, self.node // stride) * self.network)


def _rates(float32: float, half: float, byte: float | None = None, float8: bool = True) -> dict[str, float]:
    rates = {"float32": float32, "bfloat16": half, "float16": half}
    if byte is not None:
        rates |= {"int8": byte} | ({"float8": byte} if float8 else {})
    return rates


HARDWARE: dict[str, Hardware] = {
    "h100": Hardware(
        "H100 SXM", 80 * 10**9, 3.35e12, _rates(494.7e12, 989.4e12, 1978.9e12), 50 * 2**20,
        "80 GB HBM3, 700 W; NVLink 450 GB/s a direction, 400 Gb/s to other nodes", 450e9, 50e9,
    ),
    "h200": Hardware(
        "H200 SXM", 141 * 10**9, 4.8e12, _rates(494.7e12, 989.4e12, 1978.9e12), 50 * 2**20,
        "141 GB HBM3e, 700 W; NVLink 450 GB/s a direction, 400 Gb/s to other nodes", 450e9, 50e9,
    ),
    "b200": Hardware(
        "B200", 180 * 10**9, 8.0e12, _rates(1.125e15, 2.25e15, 4.5e15), 126 * 2**20,
        "180 GB HBM3e, 1000 W; NVLink 900 GB/s a direction, 400 Gb/s to other nodes", 900e9, 50e9,
    ),
    "a100": Hardware(
        "A100 80GB SXM", 80 * 10**9, 2.039e12, _rates(156e12, 312e12, 624e12, float8=False), 40 * 2**20,
        "80 GB HBM2e; NVLink 300 GB/s a direction, 200 Gb/s to other nodes", 300e9, 25e9,
    ),
    "rtx4090": Hardware(
        "RTX 4090", 24 * 10**9, 1.008e12,
        _rates(82.6e12, 165.2e12, 660.6e12) | {"float16": 330.3e12}, 72 * 2**20,
        "24 GB GDDR6X; bfloat16 adds up in float32, float16 and float8 at twice the rate in float16; PCIe 4.0 with 16 "
        "lanes, 10 Gb/s Ethernet a card to other nodes", 31.5e9, 1.25e9,
    ),
    "rtx5090": Hardware(
        "RTX 5090", 32 * 10**9, 1.792e12,
        _rates(104.8e12, 209.5e12, 838e12) | {"float16": 419e12}, 96 * 2**20,
        "32 GB GDDR7; bfloat16 adds up in float32, float16 and float8 at twice the rate in float16; PCIe 5.0 with 16 "
        "lanes, 10 Gb/s Ethernet a card to other nodes", 63e9, 1.25e9,
    ),
    "cpu": Hardware(
        "CPU, 2 cores", 16 * 10**9, 89.6e9, {"float32": 512e9, "bfloat16": 1024e9, "int8": 2048e9}, 32 * 2**20,
        "two cores with AVX-512 at 4 GHz, two channels of DDR5-5600; 10 Gb/s Ethernet", 1.25e9, 1.25e9, 1,
    ),
}  # fmt: skip
"""Machines by a short name. A vendor's GB is counted as 10^9 bytes; a GPU's driver may report some percent more."""


def find_hardware(name: str) -> Hardware:
    """Return a machine by its short or full name, whatever its case and spaces.

    Args:
        name: A key of HARDWARE, such as "h200", or the name of one of its machines.
    """
    wanted = _plain(name)
    for short, found in HARDWARE.items():
        if wanted in (short, _plain(found.name)):
            return found
    raise ValueError(
        f"hardware must be one of {', '.join(HARDWARE)}, got {name!r}; or give bandwidth, flops and memory"
    )


def make_hardware(
    memory_bytes: int, bandwidth: float, flops: float, name: str = "given numbers", link: float = math.inf
) -> Hardware:
    """Return a machine of a user's own numbers: bytes, bytes a second, operations a second in the model's dtype.

    Args:
        memory_bytes: Bytes of its memory.
        bandwidth: Bytes a second between the memory and the chip.
        flops: Operations a second; a multiply-add counts as 2.
        name: Its name in tables.
        link: Bytes a second that it receives from other ranks; inf: that takes no time.
    """
    given = (("memory", memory_bytes), ("bandwidth", bandwidth), ("flops", flops), ("link", link))
    for what, value in given:
        if not value > 0:
            raise ValueError(f"{what} must be above 0, got {value}")
    return Hardware(name, memory_bytes, bandwidth, {"float32": flops}, 0, "as given", link, link)


def several(hardware: Hardware, devices: int) -> Hardware:
    """Return several machines as if they were one: the model is spread evenly, and communication takes no time.

    Args:
        hardware: One of the machines.
        devices: How many there are.
    """
    check_size("devices", devices)
    if devices == 1:
        return hardware
    return replace(
        hardware,
        name=f"{devices} x {hardware.name}",
        memory_bytes=devices * hardware.memory_bytes,
        bandwidth=devices * hardware.bandwidth,
        matrix_rate={dtype: devices * rate for dtype, rate in hardware.matrix_rate.items()},
        cache_bytes=devices * hardware.cache_bytes,
    )


@dataclass(frozen=True)
class Bound:
    """A time that cannot be beaten."""

    what: str
    """"prefill", "decode", "decode, experts at random" or "training step"."""
    seconds: float
    """The least time."""
    limit: str
    """The limit that sets the time: "memory bandwidth", "matrix rate", or "link" between ranks."""
    detail: str
    """The times, with operations and bytes, in words."""
    flops: int
    """Least operations; a multiply-add counts as 2."""
    moved: int
    """Bytes that must be moved, without what may stay in the chip's cache."""
    received: int = 0
    """Bytes that a rank receives from others."""


def bound(
    what: str, flops: int, nbytes: int, hardware: Hardware, dtype: torch.dtype, received: Received = NOTHING,
    split: Split = WHOLE,
) -> Bound:  # fmt: skip
    """Return the largest of the times; data that fits into the chip's cache is not counted as moved."""
    moved = max(0, nbytes - hardware.cache_bytes)
    moving, computing = moved / hardware.bandwidth, flops / hardware.rate(dtype)
    linking = link_seconds(received, split, hardware)
    limit = "memory bandwidth" if moving >= computing else "matrix rate"
    times = f"{flops / 1e9:.4g} GFLOP in {computing * 1e3:.4g} ms, {moved / 1e9:.4g} GB in {moving * 1e3:.4g} ms"
    if linking > max(moving, computing):
        limit = "link"
    if received.total:
        times += f", {received.total / 1e9:.4g} GB from other ranks in {linking * 1e3:.4g} ms"
    return Bound(what, max(moving, computing, linking), limit, times, flops, moved, received.total)


def link_seconds(received: Received, split: Split, hardware: Hardware) -> float:
    """Return the seconds of the bytes that a rank receives, at the rates of its links.

    Tensor ranks are neighbours, then context ranks; so tensor ranks are in the same node first.
    """
    divided = (received.sums + received.logits + received.shared) / hardware.link_rate(split.tensor)
    crossing = received.context / hardware.link_rate(split.context, split.tensor)
    return divided + crossing + received.gradients / hardware.link_rate(split.context * split.replicas, split.tensor)


def time_bounds(
    model: Model | MemoryPlan, hardware: Hardware, batch: int = 1, tokens: int = 4096, optimizer: str = "adamw"
) -> list[Bound]:
    """Return lower bounds of the times of a prefill, of decoding one token, and of a training step.

    There are `batch` sequences of `tokens` tokens. A bound is the least operations at the peak rate, or the least bytes
    at the peak bandwidth, whichever takes longer; a real program needs both, and launches. All tokens of a batch are
    assumed to use the same experts; "decode, experts at random" is the expectation if each chooses at random. Training
    has bfloat16 products where the machine has them, and weights and optimiser in float32.

    If the model is that of a rank (split_model), the bytes that it receives, at the rate of its link, may take longest.
    Context ranks share the tokens of a prefill and of a training step; of a prefill, the last rank keeps all state.

    Args:
        model: The model, or the plan of its memory, which has the dtypes of its state.
        hardware: The machine; of several ranks, that of each.
        batch: Sequences at a time.
        tokens: Tokens of a sequence: those of the prefill, those before the decoded token, and those of a training
            sequence.
        optimizer: "adamw" or "muon".
    """
    for name, value in (("batch", batch), ("tokens", tokens)):
        check_size(name, value)
    if optimizer not in ("adamw", "muon"):
        raise ValueError(f"optimizer must be 'adamw' or 'muon', got {optimizer!r}")
    memory = model if isinstance(model, MemoryPlan) else plan_memory(model)
    routings = ("least",) if memory.model.config.experts is None else ("least", "expected")
    own = -(-batch * tokens // memory.model.split.context)
    return [
        prefill_bound(memory, hardware, batch, tokens),
        *(decode_bound(memory, hardware, batch, tokens, routing) for routing in routings),
        training_bound(memory, hardware, own, tokens, optimizer),
    ]


def prefill_bound(memory: MemoryPlan, hardware: Hardware, batch: int, tokens: int) -> Bound:
    """Return a lower bound of reading `batch` sequences of `tokens` tokens."""
    model, split = memory.model, memory.model.split
    flops = -(-batch * plan_flops(model).forward(tokens, 1, "least") // split.context)
    moved = prefill_bytes(memory, batch, tokens).total
    received = prefill_received(memory, batch, tokens)
    return bound("prefill", flops, moved, hardware, model.dtype, received, split)


def decode_bound(memory: MemoryPlan, hardware: Hardware, batch: int, tokens: int, routing: str = "least") -> Bound:
    """Return a lower bound of a decoding step: one token in each of `batch` sequences, after `tokens` others.

    `routing` is that of decode_bytes.
    """
    model = memory.model
    flops = batch * plan_flops(model).decode(tokens, "least")
    what = "decode" if routing == "least" else "decode, experts at random"
    moved, received = decode_bytes(memory, batch, tokens, routing).total, decode_received(memory, batch)
    return bound(what, flops, moved, hardware, model.dtype, received, model.split)


def tokens_per_second(
    plan: MemoryPlan, hardware: Hardware, batch: int, tokens: int, routing: str = "least"
) -> float:  # fmt: skip
    """Return the most tokens a second that decoding can give: the batch over the least time of its step.

    Args:
        plan: The memory of the model; that of a rank if ranks share it. The result is per replica.
        hardware: The machine.
        batch: Sequences at a time; largest_batch says how many fit.
        tokens: Tokens of each sequence before the decoded one.
        routing: The experts that a batch touches. "least": all rows go to the same; "expected": each chooses at random.
    """
    for name, value in (("batch", batch), ("tokens", tokens)):
        check_size(name, value)
    return batch / decode_bound(plan, hardware, batch, tokens, routing).seconds


def training_bound(
    memory: MemoryPlan, hardware: Hardware, tokens_per_step: int, length: int, optimizer: str = "adamw",
    precision: str = "bfloat16", recompute: bool = False,
) -> Bound:  # fmt: skip
    """Return a lower bound of a training step on `tokens` tokens of each rank, in sequences of this length.

    `precision` is that of the products.
    """
    trained = round(tokens_per_step * plan_flops(memory.model).training(length, recompute, "least"))
    half = precision == "bfloat16" and bool(hardware.matrix_rate.keys() & {"bfloat16", "float16"})
    # Each parameter, and its optimiser state, is read and written once; products read the weights once more.
    kept = 1 + {"adamw": 2, "muon": 1}[optimizer]
    plain = memory if memory.model.weights is None else plan_memory(replace(memory.model, weights=None, kept=()))
    read = touched_weights(plain, tokens_per_step) // plain.model.dtype.itemsize * 2
    updated = 2 * 4 * kept * memory.parameters + read
    received = training_received(memory, tokens_per_step, length, precision == "bfloat16", recompute)
    dtype = torch.bfloat16 if half else torch.float32
    return bound("training step", trained, updated, hardware, dtype, received, memory.model.split)


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "").replace("_", "").removesuffix("sxm")
