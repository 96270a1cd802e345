"""Attention of one token over caches on a GPU, compared with FlashInfer, whose kernels are compiled ahead of time.

    python -m bench.models.flashinfer --build DIR
    python -m bench.models.flashinfer --peers DIR/site [--json FILE] [--only kimi|qwen] [--quick] [--rounds 20]

--build needs no GPU and no toolkit of CUDA, but torch, g++ and ninja; nvcc comes from wheels. It compiles FlashInfer's
modules for sm_90a with CUDA 13.0, one file at a time (MAX_JOBS overrides that), which takes half an hour, and leaves in
DIR/site a tree of Python files and modules where FlashInfer finds them ahead of time: --peers compiles nothing and
needs no network. DIR/wheels has to contain these wheels for Linux x86-64, from the Python package index:

    flashinfer-python 0.7.2.post1, nvidia-ml-py 13.615.71
    apache-tvm-ffi 0.1.15.post2, for each Python that builds or measures, e.g. cp311 and cp312
    nvidia-cuda-nvcc 13.0.88, nvidia-cuda-crt 13.0.88, nvidia-nvvm 13.0.88, nvidia-cuda-runtime 13.0.96
    nvidia-curand 10.4.0.35, for a header
    nvidia-cuda-cuobjdump 13.4.92, which lists the architectures inside the modules

--peers needs torch for CUDA 13, whose runtime library the modules load. The attention alone runs, as in
bench/models/long_attention.py: "kimi" reads the latent cache of Kimi-Linear-48B (rank 512, 64 shared channels, 32
heads), "qwen" the keys and values of Qwen3.5-35B-A3B (16 heads of queries, 2 of keys, 256 channels), both in bfloat16.
All contestants read the same caches; FlashInfer's pages are PAGE tokens of it, in order, and its plans, which are made
before, fit these lengths exactly. Times are medians of replays of a CUDA graph over copies of the cache that together
do not fit the L2 cache. The bound is that of the bytes of cache, queries and outputs at 4.8 TB/s. The error is
relative, that of the first heads of the last row, against a softmax in float64. A contestant that fails prints its
error and is left out. FlashInfer's kernels for experts are not built: their many modules of CUTLASS take far longer.
"""

import argparse
import gc
import importlib
import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from bench.models.long_attention import COPIES, DEVICE, graph_us
from bench.timing import given_command, in_fresh_process, show

BYTES_PER_SECOND = 4.8e12
CASES = ((1, 4096), (1, 32768), (1, 131072), (1, 1048576), (64, 512), (64, 4096))
"""Rows, and the entries of each."""
PAGE = 64
CHECKED_HEADS = 4
MOST_MIB = 60
RANK, SHARED, LATENT_HEADS = 512, 64, 32
HEADS, KV_HEADS, HEAD_DIM = 16, 2, 256

PACKAGES = ("flashinfer_python", "apache_tvm_ffi", "nvidia_ml_py")
TOOLKIT = tuple(f"nvidia_{x}" for x in ("cuda_nvcc", "cuda_crt", "nvvm", "cuda_runtime", "curand", "cuda_cuobjdump"))
UNNEEDED = {"3rdparty", "__pycache__", "cython", "include", "share", "src"}
"""Folders of tvm_ffi that only compilers read."""


class Case(NamedTuple):
    """One layer's attention of one token per row, each over the same number of entries."""

    layer: str
    rows: int
    entries: int

    @property
    def cache_bytes(self) -> int:
        return 2 * self.rows * self.entries * (RANK + SHARED if self.layer == "kimi" else 2 * KV_HEADS * HEAD_DIM)

    @property
    def least_bytes(self) -> int:
        """The bytes of cache, queries and outputs."""
        widths = LATENT_HEADS * (RANK + SHARED + RANK) if self.layer == "kimi" else 2 * HEADS * HEAD_DIM
        return self.cache_bytes + 2 * self.rows * widths

    @property
    def bound_us(self) -> float:
        return 1e6 * self.least_bytes / BYTES_PER_SECOND


class Problem(NamedTuple):
    """The tensors of a case.

    queries: `rows 1 heads d`; for kimi, those for the latent vectors and those for the shared channels.
    caches: Copies of the cache, each `rows n 1 576` for kimi, keys and values `rows n 2 256` for qwen.
    """

    case: Case
    queries: tuple[Tensor, ...]
    caches: list[tuple[Tensor, ...]]
    lengths: Tensor
    scale: float


Calls = Sequence[Callable[[], Tensor]]


def make_problem(case: Case, device: str = DEVICE, dtype: torch.dtype = torch.bfloat16) -> Problem:
    def filled(*shape: int) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=device).normal_()

    rows, n = case.rows, case.entries
    copies = range(max(1, min(32, COPIES // case.cache_bytes)))
    lengths = torch.full((rows,), n, device=device)
    if case.layer == "kimi":
        queries = filled(rows, 1, LATENT_HEADS, RANK), filled(rows, 1, LATENT_HEADS, SHARED)
        return Problem(case, queries, [(filled(rows, n, 1, RANK + SHARED),) for _ in copies], lengths, 192**-0.5)
    caches = [(filled(rows, n, KV_HEADS, HEAD_DIM), filled(rows, n, KV_HEADS, HEAD_DIM)) for _ in copies]
    return Problem(case, (filled(rows, 1, HEADS, HEAD_DIM),), caches, lengths, HEAD_DIM**-0.5)


def reference(problem: Problem) -> Tensor:
    """Return the outputs `heads d` of the last row's first heads over the first copy of the cache, in float64."""
    q = torch.cat([x[-1, 0, :CHECKED_HEADS] for x in problem.queries], -1).double()
    keys = problem.caches[0][0][-1, :, 0].double()  # the first heads of queries share the first head of keys
    values = keys[:, :RANK] if problem.case.layer == "kimi" else problem.caches[0][1][-1, :, 0].double()
    return torch.softmax(problem.scale * (q @ keys.T), -1) @ values


def error_of(output: Tensor, wanted: Tensor) -> float:
    """Return the relative error of an output `rows 1 heads d` or `rows heads d`."""
    found = output.flatten(0, -3)[-1, : len(wanted)].double()
    return float((found - wanted).norm() / wanted.norm())


def ours(problem: Problem) -> Calls:
    if problem.case.layer == "kimi":
        from lineate.kernels.layers.latent import latent_attention as attention
    else:
        from lineate.kernels.layers.cached import cached_attention as attention
    return [partial(attention, *problem.queries, *x, problem.lengths, problem.scale) for x in problem.caches]


def pages(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return on the host the rows' bounds in the list of pages, that list, and the rows' number of queries, summed."""
    each = case.entries // PAGE
    queries = torch.arange(case.rows + 1, dtype=torch.int32)
    return queries * each, torch.arange(case.rows * each, dtype=torch.int32), queries


def workspace() -> Tensor:
    return torch.zeros(2**28, dtype=torch.uint8, device=DEVICE)


def their_latent(problem: Problem, backend: str) -> Calls:
    mla = importlib.import_module("flashinfer.mla")
    bounds, indices, starts = pages(problem.case)
    wrapper = mla.BatchMLAPagedAttentionWrapper(workspace(), backend=backend)
    lengths = problem.lengths.to("cpu", torch.int32)
    wrapper.plan(
        metadata=mla.MLAPlanMetadata.csr(starts, bounds, indices, lengths), num_heads=LATENT_HEADS, head_dim_ckv=RANK,
        head_dim_kpe=SHARED, page_size=PAGE, causal=False, sm_scale=problem.scale, q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16, query_layout="split", kv_cache_layout="packed",
    )  # fmt: skip
    run = partial(wrapper.run, query=tuple(x[:, 0] for x in problem.queries))
    return [partial(run, kv_cache=x.view(-1, PAGE, RANK + SHARED)) for (x,) in problem.caches]


def their_cached(problem: Problem, backend: str, tensor_cores: bool) -> Calls:
    decode = importlib.import_module("flashinfer.decode")
    bounds, indices, _ = pages(problem.case)
    options: dict[str, Any] = {"use_tensor_cores": tensor_cores, "backend": backend}
    wrapper = decode.BatchDecodeWithPagedKVCacheWrapper(workspace(), "NHD", **options)
    last = torch.full((problem.case.rows,), PAGE, dtype=torch.int32)  # tokens of each row's last page
    wrapper.plan(
        bounds, indices, last, HEADS, KV_HEADS, HEAD_DIM, PAGE, q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16, sm_scale=problem.scale,
    )  # fmt: skip
    run = partial(wrapper.run, problem.queries[0][:, 0])
    return [partial(run, tuple(x.view(-1, PAGE, KV_HEADS, HEAD_DIM) for x in cache)) for cache in problem.caches]


CONTESTANTS: dict[str, dict[str, Callable[[Problem], Calls]]] = {
    "kimi": {
        "lineate": ours,
        "flashinfer fa2": partial(their_latent, backend="fa2"),
        "flashinfer fa3": partial(their_latent, backend="fa3"),
    },
    "qwen": {
        "lineate": ours,
        "flashinfer decode": partial(their_cached, backend="fa2", tensor_cores=False),
        "flashinfer fa2": partial(their_cached, backend="fa2", tensor_cores=True),
        "flashinfer fa3": partial(their_cached, backend="fa3", tensor_cores=True),
    },
}


def row_of(case: Case, contestant: str, us: float, error: float) -> dict[str, Any]:
    return {
        "layer": case.layer, "rows": case.rows, "entries": case.entries, "contestant": contestant, "us": us,
        "bound_us": case.bound_us, "gb_per_s": case.least_bytes / us / 1e3, "error": error,
    }  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    name = f"{row['layer']} {row['rows']} x {row['entries']}"
    times = [
        f"{row['us']:.1f}",
        f"{row['bound_us']:.1f}",
        f"{row['gb_per_s']:.0f}",
        f"{row['bound_us'] / row['us']:.0%}",
    ]
    return [name, row["contestant"], *times, f"{row['error']:.1e}"]


COLUMNS = ["rows x entries", "contestant", "us", "bound us", "GB/s", "of the bound", "error"]


@torch.inference_mode()
def measure(case: Case, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each contestant that runs."""
    problem = make_problem(case)
    wanted = reference(problem)
    for contestant, make in CONTESTANTS[case.layer].items():
        try:
            calls = make(problem)
            error = error_of(calls[0](), wanted)
            torch.cuda.synchronize()
            yield row_of(case, contestant, graph_us(calls, rounds), error)
        except Exception as failure:  # whatever a contestant raises, the others go on
            print(f"{case} {contestant}: {type(failure).__name__}: {str(failure)[:2000]}", flush=True)
            torch.cuda.synchronize()  # raises if the failure has made the device unusable
        calls = ()
        gc.collect()
        torch.cuda.empty_cache()


def load(peers: Path) -> None:
    """Make FlashInfer importable from the folder, unable to compile anything."""
    if not (peers / "flashinfer").is_dir():
        raise SystemExit(f"{peers} has no folder flashinfer; make it with --build")
    sys.path.insert(0, str(peers.resolve()))
    os.environ["FLASHINFER_DISABLE_JIT"] = "1"
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.mkdtemp())
    for name in ("requests", "tqdm"):  # imported, but for downloads and tuning alone
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = mock.MagicMock()


def run(args: argparse.Namespace) -> None:
    load(args.peers)
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": version("triton")}
    machine["flashinfer"] = importlib.import_module("flashinfer.version").__version__
    found = {"command": given_command(), "date": datetime.now(UTC).isoformat(), "machine": machine}
    rows: list[dict[str, Any]] = []
    for layer, shape in itertools.product(CONTESTANTS, CASES[:2] if args.quick else CASES):
        if args.only in (None, layer):
            for row in measure(Case(layer, *shape), args.rounds):
                rows.append(row)
                print(" ".join(cells(row)), flush=True)
            if args.json:  # now, since a later case may be interrupted
                args.json.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")
    show("attention of one token", COLUMNS, [cells(row) for row in rows])


def find_wheels(folder: Path) -> dict[str, list[Path]]:
    """Return the wheels by package; raise SystemExit if one is missing."""
    found = {name: sorted(folder.glob(f"{name}-*.whl")) for name in (*PACKAGES, *TOOLKIT)}
    if missing := [name for name, wheels in found.items() if not wheels]:
        raise SystemExit(f"{folder} has no wheels of: {', '.join(missing)}")
    return found


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack a wheel with its files' modes, which make programs executable."""
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            path = Path(archive.extract(item, folder))
            if mode := item.external_attr >> 16 & 0o777:
                path.chmod(mode)


def make_toolkit(wheels: dict[str, list[Path]], folder: Path) -> Path:
    """Unpack nvcc, and add the names of libraries that FlashInfer links; return its root."""
    for wheel in itertools.chain(*(wheels[name] for name in TOOLKIT)):
        unpack(wheel, folder)
    root = next(folder.glob("nvidia/*/bin/nvcc")).parents[1]
    (root / "lib64").symlink_to("lib")
    runtime = next((root / "lib").glob("libcudart.so.*"))
    (root / "lib" / "libcudart.so").symlink_to(runtime.name)
    stubs = root / "lib" / "stubs"  # the driver is not on this machine, and the modules call none of its functions
    stubs.mkdir()
    subprocess.run(["g++", "-shared", "-x", "c++", "/dev/null", "-o", stubs / "libcuda.so"], check=True)
    return root


def specs() -> dict[str, Any]:
    """Return FlashInfer's specifications of the modules that the contestants load."""
    attention = importlib.import_module("flashinfer.jit.attention.modules")
    types = [*(torch.bfloat16,) * 3, torch.int32]  # of queries, cache, outputs and indices
    plain = [HEAD_DIM, HEAD_DIM, 0, False, False]  # neither positions nor a window nor a cap of the scores
    return {
        "decode": attention.gen_batch_decode_module(*types, *plain),
        "mla fa2": attention.gen_batch_mla_module("fa2", *types, RANK, SHARED, False),
        "mla fa3": attention.gen_batch_mla_module("fa3", *types, RANK, SHARED, False),
        "tensor cores fa2": attention._gen_batch_prefill_primary_module("fa2", *types, *plain, False),
        "tensor cores fa3": attention.gen_batch_prefill_module("fa3", *types, *plain, False),
    }


def copy_python(source: Path, site: Path) -> None:
    """Copy what importing has read: folders of FlashInfer's Python files, templates, tvm_ffi and the others."""
    modules = [Path(x.__file__) for x in list(sys.modules.values()) if getattr(x, "__file__", None)]
    folders = {x.parent for x in modules if x.is_relative_to(source / "flashinfer")}
    wanted = [x for folder in folders for x in folder.iterdir() if x.suffix in (".py", ".json")]
    templates = source / "flashinfer" / "data" / "csrc"
    wanted += [x for x in templates.iterdir() if x.suffix == ".jinja" or x.name.startswith("batch_")]
    others = [*source.glob("*tvm_ffi*/**/*"), source / "pynvml.py"]
    wanted += [x for x in others if x.is_file() and not UNNEEDED.intersection(x.relative_to(source).parts)]
    for x in wanted:
        path = site / x.relative_to(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(x, path)


def check(site: Path) -> None:
    """Print as JSON the modules that FlashInfer finds in the folder and loads; the caller sets the environment."""
    load(site)
    importlib.import_module("flashinfer.decode")
    print(json.dumps({key: spec.is_aot and spec.try_load() is not None for key, spec in specs().items()}))


def architectures(module: Path, root: Path) -> str:
    """Return the architectures that a module has machine code for."""
    listed = subprocess.check_output([root / "bin" / "cuobjdump", "--list-elf", module], text=True)
    return " ".join(sorted(set(re.findall(r"sm_\w+", listed))))


def build(folder: Path) -> None:
    wheels = find_wheels(folder / "wheels")
    if missing := [x for x in ("g++", "ninja") if shutil.which(x) is None]:
        raise SystemExit(f"not installed: {', '.join(missing)}")
    work, site = folder.resolve() / "work", folder.resolve() / "site"
    for path in (work, site):
        shutil.rmtree(path, ignore_errors=True)
    source = work / "packages"
    for wheel in itertools.chain(*(wheels[name] for name in PACKAGES)):
        unpack(wheel, source)
    (source / "flashinfer" / "__init__.py").write_text("")  # FlashInfer's own imports kernels of all architectures
    root = make_toolkit(wheels, work / "toolkit")
    os.environ.setdefault("MAX_JOBS", "1")
    os.environ |= {"FLASHINFER_CUDA_ARCH_LIST": "9.0a", "FLASHINFER_LOGGING_LEVEL": "warning"}
    os.environ |= {"FLASHINFER_WORKSPACE_BASE": str(work), "CUDA_HOME": str(root)}
    sys.path.insert(0, str(source))
    importlib.import_module("flashinfer.decode")  # imports flashinfer.mla, too
    for key, spec in specs().items():
        start = time.perf_counter()
        try:
            spec.build()
        except RuntimeError as failure:
            print(f"{key}: {str(failure)[-2000:]}", flush=True)
            continue
        target = site / "flashinfer" / "data" / "aot" / spec.name / f"{spec.name}.so"
        target.parent.mkdir(parents=True)
        shutil.copy(spec.jit_library_path, target)
        size, seconds = target.stat().st_size / 2**20, time.perf_counter() - start
        print(f"{key}: {seconds:.0f} s, {size:.2f} MiB, {architectures(target, root)}, {spec.name}", flush=True)
    copy_python(source, site)
    # The runtime library comes with torch for CUDA where the modules run; here it is the toolkit's.
    fresh = {**os.environ, "LD_LIBRARY_PATH": str(root / "lib"), "PYTHONDONTWRITEBYTECODE": "1"}
    found = in_fresh_process(["-m", "bench.models.flashinfer", "--check", str(site)], fresh)
    size = sum(x.stat().st_size for x in site.rglob("*") if x.is_file()) / 2**20
    print(f"{site.name}: {size:.1f} MiB; found ahead of time: {found}")
    if size > MOST_MIB or not found or not all(found.values()):
        raise SystemExit(f"{site.name} has more than {MOST_MIB} MiB, or lacks a module")


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--build", type=Path, metavar="DIR")
    action.add_argument("--peers", type=Path, metavar="DIR")
    action.add_argument("--check", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", choices=tuple(CONTESTANTS))
    parser.add_argument("--quick", action="store_true", help="the first two cases of each layer alone")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args(given)
    if args.build:
        build(args.build)
    elif args.check:
        check(args.check)
    else:
        run(args)


if __name__ == "__main__":
    main()
