"""Two GPUs that are not there: calls run through their launches, and each kernel is lowered to Triton's IR.

This module is for a process of its own (lowering.py), because it changes torch and triton. Tensors on the meta device
say that they are on a GPU (to all but torch itself), have no memory and cost nothing. A launch binds its arguments and
looks for a compiled kernel as on a GPU; a kernel that is not there yet goes through the first stages of the compiler.
"""

import gc
import math
import sys
from contextlib import nullcontext
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.language import core
from triton.runtime import driver

CAPABILITIES = (90, 80)
"""Of the GPUs cuda:0, with the stages of Hopper, and cuda:1, with the portable ones."""
MULTIPROCESSORS = (132, 108)
SHARED_MEMORY = (232448, 166912)
MAKERS = "arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand randint randn tensor zeros"
MOVERS = "new_empty new_full new_ones new_tensor new_zeros to"
META = torch.device("meta")
_device = torch._C.TensorBase.device.__get__


def real_device(x: Tensor) -> torch.device:
    """Return the device that torch itself sees, also of a subclass, whose attributes go through its own functions."""
    with torch._C.DisableTorchFunctionSubclass():
        return _device(x)


class Lowered:
    """Stands for a compiled kernel, or for one that does not compile, and notes its launches."""

    function = packed_metadata = None

    def __init__(self, gpus: "FakeGPUs", kernel: str, variant: str, link: int, beside: bool) -> None:
        self.gpus = gpus
        self.kernel = kernel
        self.variant = variant
        self.link = link
        self.beside = beside
        self.failure = ""

    def launch_metadata(self, *_: object) -> None:
        pass

    def run(self, *_: object) -> None:
        self.gpus.launched.append(self.kernel)
        self.gpus.variants.append(self.variant)
        self.gpus.links.append(self.link)
        if self.beside:
            self.gpus.beside.append(self.kernel)
        if self.failure:
            self.gpus.failures.append(self.failure)


class FakeGPUs:
    """The driver of the two GPUs, of which one is the current one."""

    def __init__(self) -> None:
        self.current = 0
        self.lowers = True
        """Whether kernels are lowered; otherwise only what is launched counts."""
        self.passes = False
        """Whether Triton's own passes run as well, up to the IR with layouts."""
        self.launched: list[str] = []
        self.variants: list[str] = []
        """What was compiled for each launch: its kernel, types, constants, alignments, warps and stages."""
        self.links: list[int] = []
        """LINK of each launch; 0 if its kernel has none."""
        self.beside: list[str] = []
        """The kernels that were launched with marks, by which scores are made beside a walk."""
        self.failures: list[str] = []
        """The compiler's messages about what was launched."""
        self.known: dict[object, Lowered] = {}
        self.compiled: list[str] = []
        """The kernels that were looked for and not there yet."""
        self.contexts: dict[str, Any] = {}
        """A context of MLIR for each architecture, with its dialects; kernels that get no further share it."""

    def get_current_device(self) -> int:
        return self.current

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", CAPABILITIES[self.current], 32)

    def compile(self, src: Any, target: GPUTarget, options: dict[str, Any], **_: object) -> Lowered:
        """Lower one kernel, as triton.compile begins; keep the compiler's message if that fails.

        A variant is lowered once: how addresses are aligned does not matter, nor does the GPU to Triton's front end.
        """
        kernel = f"{src.fn.fn.__module__}.{src.name}"
        constants = {src.fn.arg_names[path[0]]: x for path, x in src.constants.items()}
        beside = "made" in src.fn.arg_names and constants.get("made", "given") is not None
        resources = [options.get(name) for name in ("num_warps", "num_stages")]
        compiled = f"{kernel} {src.signature} {sorted(constants.items(), key=str)} {src.attrs} {resources}"
        found = Lowered(self, kernel, compiled, constants.get("LINK", 0), beside)
        self.compiled.append(kernel)
        if not self.lowers:
            return found
        variant: tuple[object, ...] = kernel, str(src.signature), str(sorted(src.constants.items()))
        if self.passes or src.fn.is_gluon():
            variant = *variant, self.passes, target.arch, options["num_warps"], options["num_stages"]
        if variant not in self.known:
            self.known[variant] = found
            try:
                self._lower(src, target, options)
            except Exception as error:
                given = {name: kind for name, kind in src.signature.items() if kind != "constexpr"}
                found.failure = f"{kernel} on sm_{target.arch}, {given}, {constants}:\n{_messages(error)}"
        return self.known[variant]

    def forget(self) -> None:
        """Let Triton look for every kernel again."""
        for x in gc.get_objects():
            if issubclass(type(x), triton.JITFunction):  # (isinstance would ask objects that warn)
                x.device_caches.clear()

    def _lower(self, src: Any, target: GPUTarget, options: dict[str, Any]) -> None:
        backend = triton.compiler.make_backend(target)
        chosen = backend.parse_options(dict(options))
        context = self.contexts.get(chosen.arch)
        if context is None or self.passes:
            context = self.contexts[chosen.arch] = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
        implementations, modules = backend.get_codegen_implementation(chosen), backend.get_module_map()
        module = src.make_ir(target, chosen, implementations, modules, context)
        stages: dict[str, Any] = {}
        backend.add_stages(stages, chosen, src.language)
        for name in ("ttir", "ttgir") if self.passes else ():
            module = stages[name](module, {}) if name in stages else module


def _messages(error: BaseException | None) -> str:
    """Return the message of an error and of those that caused it."""
    found = []
    while error is not None:
        found.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return "\n".join(found)


def make_quick() -> None:
    """Leave out repeated work of Triton's front end, of which the IR is the same; a quarter of its time.

    Functions are parsed once, all tensors of one shape share its constants, and garbage is collected rarely.
    """
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)
    if hasattr(triton.JITFunction, "parse"):
        triton.JITFunction.parse = cache(triton.JITFunction.parse)

    @cache
    def shape_of(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return core.constexpr(math.prod(sizes)), core.tuple([core.constexpr(size) for size in sizes])

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(tuple(type.shape) if type.is_block() else ())

    core.tensor.__init__ = init_tensor


def install() -> FakeGPUs:
    """Change torch and triton; lineate and its kernels must be imported after this."""
    make_quick()
    gpus = FakeGPUs()
    driver.set_active(gpus)
    triton.compiler.compile = gpus.compile

    def seen(x: Tensor) -> bool:
        return real_device(x).type == "meta" and not sys._getframe(2).f_globals["__name__"].startswith("torch")

    Tensor.device = property(lambda x: torch.device("cuda", gpus.current) if seen(x) else real_device(x))
    Tensor.is_cuda = property(lambda x: seen(x))
    Tensor.get_device = lambda x: gpus.current if seen(x) else -1
    Tensor.data_ptr = lambda x: 0
    for owner, names in ((torch, MAKERS), (Tensor, MOVERS)):
        for name in names.split():
            setattr(owner, name, _without_gpu(getattr(owner, name)))
    torch.cuda.current_device = lambda: gpus.current
    torch.cuda.device_of = lambda x: nullcontext()
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.current_stream = lambda device=None: SimpleNamespace(synchronize=lambda: None)
    torch.cuda.get_device_capability = lambda device=None: divmod(CAPABILITIES[gpus.current], 10)
    torch.cuda.get_device_properties = lambda device=None: SimpleNamespace(
        multi_processor_count=MULTIPROCESSORS[gpus.current], shared_memory_per_block_optin=SHARED_MEMORY[gpus.current]
    )
    return gpus


def _without_gpu(run: Any) -> Any:
    """Return run with the meta device in place of a GPU among its arguments."""

    def real(x: object) -> object:
        on_gpu = x.type == "cuda" if isinstance(x, torch.device) else isinstance(x, str) and x.startswith("cuda")
        return META if on_gpu else x

    @wraps(run)
    def there(*given: object, **named: object) -> Any:
        return run(*map(real, given), **{name: real(x) for name, x in named.items()})

    return there
