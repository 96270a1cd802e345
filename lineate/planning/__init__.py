"""Plan what a model needs: bytes, operations, time.

>>> model = read_model("qwen3-next-80b")
>>> plan_memory(model).total(batch=1, tokens=262144), plan_flops(model).decode(262144)
>>> time_bounds(model, HARDWARE["h200"], batch=1, tokens=262144)
>>> estimate_times(model, HARDWARE["h200"], batch=1, tokens=262144)
>>> plan_memory(split_model(model, tensor=8)).weights
"""

from typing import TYPE_CHECKING

from lineate.system.lazy import first_use

if TYPE_CHECKING:
    from lineate.planning.communication import Received, decode_received, prefill_received, training_received
    from lineate.planning.compute import FlopsPlan, LayerFlops, Moved, decode_bytes, plan_flops, prefill_bytes
    from lineate.planning.estimates import Estimate, estimate_decode, estimate_prefill, estimate_times
    from lineate.planning.fit import crossover, largest_batch, longest_context
    from lineate.planning.formulas import differences, teaching, teaching_of
    from lineate.planning.hardware import (
        HARDWARE,
        Bound,
        Hardware,
        find_hardware,
        make_hardware,
        several,
        time_bounds,
        tokens_per_second,
    )
    from lineate.planning.memory import LayerMemory, MemoryPlan, TrainingMemory, plan_memory, plan_training
    from lineate.planning.models import DTYPES, Model, Split, from_numbers, read_model, variants
    from lineate.planning.split import split_model
else:
    __getattr__, __dir__ = first_use(
        __name__,
        {
            "communication": ("Received", "decode_received", "prefill_received", "training_received"),
            "compute": ("FlopsPlan", "LayerFlops", "Moved", "decode_bytes", "plan_flops", "prefill_bytes"),
            "estimates": ("Estimate", "estimate_decode", "estimate_prefill", "estimate_times"),
            "fit": ("crossover", "largest_batch", "longest_context"),
            "hardware": (
                "HARDWARE", "Bound", "Hardware", "find_hardware", "make_hardware", "several", "time_bounds",
                "tokens_per_second",
            ),
            "memory": ("LayerMemory", "MemoryPlan", "TrainingMemory", "plan_memory", "plan_training"),
            "models": ("DTYPES", "Model", "Split", "from_numbers", "read_model", "variants"),
            "split": ("split_model",),
            "formulas": ("differences", "teaching", "teaching_of"),
        },
    )  # fmt: skip

__all__ = [
    "DTYPES",
    "HARDWARE",
    "Bound",
    "Estimate",
    "FlopsPlan",
    "Hardware",
    "LayerFlops",
    "LayerMemory",
    "MemoryPlan",
    "Model",
    "Moved",
    "Received",
    "Split",
    "TrainingMemory",
    "crossover",
    "decode_bytes",
    "decode_received",
    "differences",
    "estimate_decode",
    "estimate_prefill",
    "estimate_times",
    "find_hardware",
    "from_numbers",
    "largest_batch",
    "longest_context",
    "make_hardware",
    "plan_flops",
    "plan_memory",
    "plan_training",
    "prefill_bytes",
    "prefill_received",
    "read_model",
    "teaching",
    "teaching_of",
    "several",
    "split_model",
    "time_bounds",
    "tokens_per_second",
    "training_received",
    "variants",
]
