"""FlashInfer's Gated DeltaNet for Hopper, called without the rest of FlashInfer.

The peers' folder needs, unpacked from their wheels: `flashinfer/gdn_kernels/delta_rule_dsl` of flashinfer-python 0.7.2;
nvidia-cutlass-dsl 4.8.1 with its libs-base, libs-core and libs-cu13; apache-tvm-ffi 0.1.11. cuda-bindings comes with
torch; a copy in the subfolder `fallback` serves where it is missing. The modules import `flashinfer.utils`, which needs
much more, so that a stand-in with four functions takes its place here.

    single      one persistent launch that walks each sequence and value head
    segments    four launches ("context parallel"): inverses, the affine map of each segment, their chain, the walks

Both want D = 128, float16 or bfloat16, as many key heads as query heads, the decay itself (not its logarithm) and beta
in float32, all without gaps. Tokens have no batch axis: cu_seqlens has the bounds of the sequences.
"""

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

KERNELS = "flashinfer.gdn_kernels.delta_rule_dsl"


def load(peers: str) -> None:
    """Make the kernels importable from the peers' folder, or from an installed FlashInfer if that is empty."""
    if peers:
        add_to_path(peers)
    # The packages' own __init__ would import kernels of all architectures.
    folders = _folders("flashinfer")
    for name in ("", ".gdn_kernels", ".gdn_kernels.delta_rule_dsl"):
        package = ModuleType(f"flashinfer{name}")
        package.__path__ = [str(Path(folder, *name.split(".")[1:])) for folder in folders]
        sys.modules[package.__name__] = package
    sys.modules["flashinfer.utils"] = _utils()


def add_to_path(peers: str) -> None:
    """Put the peers' folder on the path, and its subfolder `fallback` where cuda-bindings is missing."""
    sys.path[:0] = [peers, str(Path(peers) / "nvidia_cutlass_dsl" / "dsl_packages")]
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        sys.path.append(str(Path(peers) / "fallback"))
        importlib.invalidate_caches()


def _folders(package: str) -> list[str]:
    found = importlib.machinery.PathFinder.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ImportError(f"no package {package}")
    return list(found.submodule_search_locations)


def _utils() -> ModuleType:
    """Return the stand-in for flashinfer.utils: three properties of the device, and scratch memory by name."""
    utils: Any = ModuleType("flashinfer.utils")
    memory: dict[tuple[str, torch.device], Tensor] = {}
    outgrown: list[Tensor] = []  # a captured graph may still use it

    def scratch(name: str, num_bytes: int, device: torch.device, zero_init: bool = False) -> Tensor:
        found = memory.get((name, device))
        if found is None or found.numel() < num_bytes:
            if found is not None:
                outgrown.append(found)
            make = torch.zeros if zero_init else torch.empty
            found = memory[name, device] = make(num_bytes, dtype=torch.uint8, device=device)
        return found

    properties = cache(torch.cuda.get_device_properties)
    utils._get_cache_buf = scratch
    utils.get_device_sm_count = cache(lambda device: properties(device).multi_processor_count)
    utils.get_device_name = cache(lambda device: properties(device).name)
    utils.get_compute_capability = cache(lambda device: (properties(device).major, properties(device).minor))
    return utils


def call(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, lengths: tuple[int, ...], segments: bool
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a call on rows of tokens `b t h k` that gives the output `b t hv v` and the states `sequence hv k v`.

    Outputs are allocated in the call, as ours are; decay and bounds exist before it.
    """
    tokens, hv, width = v.shape[0] * v.shape[1], *v.shape[2:]
    flat = [x.reshape(tokens, *x.shape[2:]) for x in (q, k, v)]
    gates = [x.reshape(tokens, hv) for x in (log_decay.exp(), beta)]
    bounds = torch.tensor([0, *lengths], device=q.device).cumsum(0)  # int64
    scale = width**-0.5
    if segments:
        run = importlib.import_module(f"{KERNELS}.delta_rule_cp_sm90").cp_delta_rule_dsl_sm90
        longest = max(lengths)
    else:
        run = importlib.import_module(f"{KERNELS}.delta_rule_sm90").delta_rule_prefill_dsl_sm90

    def make() -> tuple[Tensor, Tensor]:
        output = torch.empty_like(flat[2])
        state = torch.empty(len(lengths), hv, width, width, device=output.device)  # sequence hv v k
        if segments:
            run(output, state, *flat, *gates, bounds, scale, max_seqlen=longest)
        else:
            run(output, state, *flat, None, *gates, bounds, scale)
        return output.view(v.shape), state.transpose(-1, -2)

    return make
