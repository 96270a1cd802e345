"""Microseconds of one mixture of experts on a GPU: kernels that read weights in place, compared with torch's path.

    python -m bench.models.experts [--json FILE] [--shapes qwen kimi] [--rows 1 8 64] [--forms bfloat16 int8] [--parts]
    python -m bench.models.experts --tune [--rows 1 64 256 4096] [--json FILE]
    python -m bench.models.experts --step [--shapes qwen kimi] [--json FILE]

The shapes are those of Qwen3.5-35B-A3B and Kimi-Linear-48B with random weights. Up to 64 rows, several calls with
different tokens are replayed in one CUDA graph, so that the chosen weights are not in the L2 cache; with more rows
calls are timed without a graph, as prompts are read. `bound` is the time of reading each touched weight once at
4.8 TB/s, or of the products at 790 TFLOP/s if that is longer. `error` is that of the output against float32 with the
same experts.
--parts times each launch alone, and --tune tries configurations of the two products. --step times x + layer(norm(x)) of
one row in bfloat16, as a decoding step computes it, with the second product and the sum in one launch and in two, by
turns.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from bench.models.quantised_gpu import median_ms, random_weight
from bench.timing import show
from lineate.layers import MixtureOfExperts, RMSNorm
from lineate.layers.gpu import coded, overlapping
from lineate.layers.step.launches import feed_step
from lineate.models import HybridConfig, preset
from lineate.quantised import QuantisedWeight
from lineate.quantised.weight import kept_nbytes

SHAPES = {"qwen": "qwen3-5-35b-a3b", "kimi": "kimi-linear-48b"}
ROWS = (1, 2, 4, 8, 16, 32, 64, 256, 4096)
FORMS = ("bfloat16", "int8", "int4", "fp8")
BYTES_PER_SECOND, FLOPS = 4.8e12, 790e12
MOST_IN_GRAPH = 64
Call = Callable[[], Any]


def config_of(shape: str) -> HybridConfig:
    return preset(SHAPES[shape])


def layer_of(shape: str, form: str, device: str) -> MixtureOfExperts:
    """Return a layer of random weights, of which those of the experts and of the shared one have a format."""
    config = config_of(shape)
    x = config.experts
    assert x is not None
    with torch.device("meta"):
        layer = MixtureOfExperts(
            config.hidden_size, x.count, x.active, x.size, shared_size=x.shared_size, shared_gate=x.shared_gate,
            scores=x.scores, scale=x.scale, groups=x.groups, active_groups=x.active_groups, kind=x.kind,
        )  # fmt: skip
    layer = layer.to(torch.bfloat16).to_empty(device=device).eval().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(0, 0.02)
    if layer.router_bias is not None:
        layer.router_bias.uniform_(-0.01, 0.01)
    if form != "bfloat16":
        for name in ("experts_gate_up", "experts_down"):
            shape_of = tuple(getattr(layer, name).shape)
            setattr(layer, name, nn.Parameter(random_weight(shape_of, form, device), requires_grad=False))
        for module in layer.shared.modules() if layer.shared is not None else ():
            if isinstance(module, nn.Linear):
                weight = random_weight(tuple(module.weight.shape), form, device)
                module.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def replayed(calls: list[Call]) -> Call:
    """Return the replay of a graph of these calls, with overlapping launches as in a decoder."""
    from lineate.decoding.capturing import capture_stream, captured

    stream = capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), overlapping():
        calls[0]()
    torch.cuda.current_stream().wait_stream(stream)
    with captured(torch.device("cuda")) as graph, overlapping():
        for call in calls:
            call()
    return graph.replay


def microseconds(calls: list[Call], rounds: int, graph: bool) -> float:
    """Return the median time of one of the calls."""
    if graph:
        run, many = replayed(calls), len(calls)
    else:
        run, many = calls[0], 1
    return 1e3 * median_ms(run, rounds, "cuda", 2) / many


def tokens_of(layer: MixtureOfExperts, rows: int) -> list[Tensor]:
    """Return the tokens of several calls."""
    hidden = layer.experts_down.shape[1]
    calls = 12 if rows <= 8 else 4 if rows <= MOST_IN_GRAPH else 1
    return [torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16) for _ in range(calls)]


def bound(layer: MixtureOfExperts, rows: list[Tensor]) -> tuple[float, float]:
    """Return the bytes that a call reads, and the least microseconds of a call."""
    pieces = [layer.experts_gate_up, layer.experts_down]
    each = sum(map(kept_nbytes, pieces)) / layer.count
    touched = statistics.mean(len(layer.route(x)[1].unique()) for x in rows)
    others = [p for p in layer.parameters() if all(p is not x for x in pieces)]
    read = touched * each + sum(map(kept_nbytes, others))
    products = 2 * len(rows[0]) * (layer.active * each_numbers(layer) + sum(x.numel() for x in others))
    return read, 1e6 * max(read / BYTES_PER_SECOND, products / FLOPS)


def each_numbers(layer: MixtureOfExperts) -> int:
    return (layer.experts_gate_up.numel() + layer.experts_down.numel()) // layer.count


def reference(layer: MixtureOfExperts, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Return the layer's output in float32 for these experts `rows active` and their weights."""
    x = x.float()

    def wide(weight: Tensor) -> Tensor:
        return (weight.decoded() if isinstance(weight, QuantisedWeight) else weight).float()

    def feed(rows: Tensor, enter: Tensor, leave: Tensor) -> Tensor:
        gate, up = (rows @ wide(enter).T).chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up) @ wide(leave).T

    y = torch.zeros_like(x)
    for e in chosen.unique().tolist():
        row, place = (chosen == e).nonzero(as_tuple=True)
        made = feed(x[row], layer.experts_gate_up[e], layer.experts_down[e])
        y.index_add_(0, row, made * weights[row, place][:, None])
    if layer.shared is not None:
        made = feed(x, layer.shared.gate_up_proj.weight, layer.shared.down_proj.weight)  # type: ignore[union-attr]
        opened = 1.0 if layer.shared_gate is None else (x @ wide(layer.shared_gate.weight).T).sigmoid()
        y = y + opened * made
    return y


def routed(layer: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights and experts as the kernels choose them; check that torch's scores are as large."""
    from lineate.kernels.layers import routing

    sigmoid = layer.scores == "sigmoid"
    how = routing.Routing(layer.active, sigmoid, layer.renormalize, layer.scale, layer.groups, layer.active_groups)
    logits = routing.score(x, layer.router.weight, None)
    rounded = torch.float32 if sigmoid else x.dtype
    weights, chosen = routing.choose(logits, layer.router_bias, how, experts=layer.count, rounded=rounded)
    theirs = layer.route(x)[0]
    torch.testing.assert_close(weights.sort(-1)[0], theirs.float().sort(-1)[0], rtol=2e-2, atol=2e-3)
    return weights, chosen.long()


@torch.no_grad()
def measure(shape: str, form: str, rows: int, rounds: int, old: bool = True) -> dict[str, Any]:
    layer = LAYERS(shape, form)
    given = tokens_of(layer, rows)
    graph = rows <= MOST_IN_GRAPH
    found = {"shape": shape, "form": form, "rows": rows}
    for name, run in (("old", layer.run_in_torch), ("new", layer)):
        if name == "old" and not old:
            found[name] = None
            continue
        calls = [partial(run, x) for x in given]
        try:
            calls[0]()
            found[name] = microseconds(calls, rounds if graph else max(3, rounds // 3), graph)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            found[name] = None
            print(f"{name} {shape} {form} {rows}: {str(error)[:200]}", flush=True)
    found["bytes"], found["bound"] = bound(layer, given)
    if rows <= 256:
        wanted = reference(layer, given[0], *routed(layer, given[0]))
        found["error"] = float((layer(given[0]).float() - wanted).norm() / wanted.norm())
    return found


_LAYERS: dict[tuple[str, str], MixtureOfExperts] = {}


def LAYERS(shape: str, form: str) -> MixtureOfExperts:
    """Return the layer of a shape and a format; only one is kept."""
    if (shape, form) not in _LAYERS:
        _LAYERS.clear()
        torch.cuda.empty_cache()
        _LAYERS[shape, form] = layer_of(shape, form, "cuda")
    return _LAYERS[shape, form]


class Stages:
    """The launches of a call in bfloat16, each by itself."""

    def __init__(self, layer: MixtureOfExperts, x: Tensor) -> None:
        from lineate.kernels.layers import experts, grouping, mixture, routing

        assert layer.shared is not None and layer.kind == "swiglu"
        inside = len(x) <= mixture.INSIDE
        own = (layer.shared.gate_up_proj.weight, layer.shared.down_proj.weight) if inside else None  # type: ignore
        made = mixture.Experts(layer.experts_gate_up, layer.experts_down, layer.kind, own)  # type: ignore[arg-type]
        how = routing.Routing(layer.active, layer.scores == "sigmoid", layer.renormalize, layer.scale)
        gate = None if layer.shared_gate is None else layer.shared_gate.weight
        self.score = partial(routing.score, x, layer.router.weight, gate)
        logits = self.score()
        self.choose = partial(
            routing.choose, logits, layer.router_bias, how, experts=layer.count, rounded=torch.float32, shared=True,
            named=inside,
        )  # fmt: skip
        weights, chosen = self.choose()
        self.rows, self.pairs, self.chosen, self.made = len(x), chosen.numel(), chosen, made
        self.x, self.count, self.dtype = x, layer.count + 1, torch.float32 if len(x) <= 64 else x.dtype
        self.hidden = torch.randn(self.pairs, layer.experts_down.shape[2], device=x.device).to(x.dtype)
        self.parts = torch.randn(len(x), chosen.shape[1], x.shape[1], device=x.device).to(self.dtype)
        outside = None if inside else torch.randn_like(x)
        self.add = partial(experts.add, self.parts, weights, torch.empty_like(x), shared=outside)
        self.group = partial(grouping.group, chosen, self.count)
        self.sort = partial(grouping.sort, chosen, self.count)
        self.grouped = partial(mixture.grouped_products, x, chosen[:, : layer.active].contiguous(), made)
        self.experts, self.grouping, self.mixture = experts, grouping, mixture

    def groups(self, size: int) -> Any:
        if self.rows <= self.mixture.ALONE:
            return self.grouping.Groups(self.chosen.view(-1), None, 1)
        return self.group(size)

    def product(self, first: bool, tile: dict[str, Any]) -> Call:
        """Return a call of one of the products in a configuration."""
        size = tile["BM"] + tile["REST"]
        if self.places(tile):
            groups = self.group(size, placed=True)
            count = groups.blocks.numel() * size
            hidden, parts = (x.new_empty(count, x.shape[-1]) for x in (self.hidden, self.parts))
            if not first:
                return partial(self.experts.leave, hidden.normal_(), self.made.down, groups, parts, rest=tile["REST"])
            weights = self.experts.Weights(self.made.gate_up, None, "swiglu")
            every = self.chosen.shape[1]
            return partial(self.experts.multiply, self.x, weights, groups, hidden, every=every, tile=tile, placed=True)
        groups, enter, leave = self.groups(size), *(self.made.shared or (None, None))
        if first:
            x, every, weights = self.x, self.chosen.shape[1], self.experts.Weights(self.made.gate_up, enter, "swiglu")
            y = self.hidden
        else:
            x, every, weights = self.hidden, 1, self.experts.Weights(self.made.down, leave, None)
            y = self.parts
        return partial(self.experts.multiply, x, weights, groups, y, every=every, tile=tile)

    def places(self, tile: dict[str, Any]) -> bool:
        """Whether what lies between the products is in the order of the blocks."""
        sizes = self.x.shape[1], self.hidden.shape[1]
        return self.made.shared is None and self.experts.leaves_by_descriptors(self.x, sizes, tile)

    def tiles(self) -> Any:
        """Return the configurations that a call takes."""
        return self.mixture.tiles_of(self.x, self.count - 1, self.hidden.shape[1], self.chosen.shape[1])


@torch.no_grad()
def measure_parts(shape: str, rows: int, rounds: int) -> dict[str, Any]:
    """Return the microseconds of each launch, in graphs."""
    layer = LAYERS(shape, "bfloat16")
    stages = [Stages(layer, x) for x in tokens_of(layer, rows)]
    tiles = stages[0].tiles()
    calls: dict[str, list[Call]] = {
        "score": [x.score for x in stages], "choose": [x.choose for x in stages], "add": [x.add for x in stages],
        "enter": [x.product(True, tiles.enter) for x in stages],
        "leave": [x.product(False, tiles.leave) for x in stages],
    }  # fmt: skip
    if rows > stages[0].mixture.ALONE:
        size = tiles.enter["BM"] + tiles.enter["REST"]
        calls["group"] = [partial(x.group, size, placed=x.places(tiles.enter)) for x in stages]
    if rows > MOST_IN_GRAPH:
        calls["sort"] = [x.sort for x in stages]
        calls["grouped_mm"] = [x.grouped for x in stages]
    found = {name: microseconds(own, rounds, True) for name, own in calls.items()}
    print(shape, rows, {name: round(us, 1) for name, us in found.items()}, flush=True)
    return {"shape": shape, "rows": rows, "us": found}


@torch.no_grad()
def measure_step(shape: str, rounds: int, turns: int = 3) -> dict[str, Any]:
    """Return the microseconds of x + layer(norm(x)) of one row, and the largest relative difference of the results."""
    from lineate.kernels.layers import experts

    layer = LAYERS(shape, "bfloat16")
    norm = RMSNorm(layer.experts_down.shape[1]).to("cuda", torch.bfloat16)
    calls = [partial(feed_step, norm, layer, x[:, None]) for x in tokens_of(layer, 1)]
    us: dict[str, list[float]] = {"together": [], "apart": []}
    results = {}
    for _ in range(turns):
        for name, bytes_of_a_thread in (("together", experts.LOADED), ("apart", 0)):
            with mock.patch.object(experts, "LOADED", bytes_of_a_thread):
                us[name].append(microseconds(calls, rounds, True))
                results[name] = [call() for call in calls]
    pairs = zip(results["together"], results["apart"], strict=True)
    differs = max(float((x - y).float().norm() / y.float().norm()) for x, y in pairs)
    found = {"shape": shape, "rows": 1, "us": us, "difference": differs}
    print(found, flush=True)
    return found


def configurations(rows: int, first: bool) -> Iterator[dict[str, Any]]:
    """Yield configurations of a product that may be the best for a number of rows."""
    from lineate.kernels.layers.mixture import tile

    if rows <= MOST_IN_GRAPH:
        for bn, bk, stages in itertools.product((32, 64) if first else (64, 128), (64, 128), (3, 4, 6)):
            yield tile(16, bn, bk, 4, stages, swap=True)
        return
    sizes = (16, 32, 64) if rows <= 1024 else (64, 128)
    for bm, bn, warps, stages in itertools.product(sizes, (64, 128), (4, 8), (3, 4)):
        wide = 2 * bn if first else bn
        if 32 <= bm * wide // (32 * warps) <= 128 and 128 * stages * (bm + wide) < 227_000:
            for rest in (0, 16, 32, 64) if bm == 128 and wide >= 64 else (0,):
                yield tile(bm, bn, 64, warps, stages, rest=rest)


@torch.no_grad()
def tune(shape: str, rows: int, rounds: int) -> list[dict[str, Any]]:
    """Return the microseconds of both products in all configurations."""
    from lineate.kernels.launching import compile_only

    layer = LAYERS(shape, "bfloat16")
    stages = [Stages(layer, x) for x in tokens_of(layer, rows)]
    found = []
    for first in (True, False):
        tiles = list(configurations(rows, first))
        calls = [stages[0].product(first, x) for x in tiles]
        with overlapping():
            compile_only(lambda calls=calls: [call() for call in calls])  # type: ignore[misc]
        if not rounds:
            continue
        own = []
        for one in tiles:
            try:
                us = microseconds([x.product(first, one) for x in stages], rounds, True)
            except Exception as error:  # it does not compile, or needs more memory than the device has
                print("failed", one, type(error).__name__, str(error)[:100], flush=True)
                continue
            own.append({"shape": shape, "rows": rows, "product": "enter" if first else "leave", "us": us, **one})
        own.sort(key=lambda x: x["us"])
        for one in own[:6]:
            print(one, flush=True)
        print("slowest", own[-1]["us"] if own else None, "of", len(own), flush=True)
        found += own
    return found


@torch.no_grad()
def tune_codes(shape: str, form: str, rows: int, rounds: int) -> list[dict[str, Any]]:
    """Return the microseconds of both products with codes in all configurations."""
    from lineate.kernels.launching import compile_only
    from lineate.kernels.layers import grouping, quantised_products

    layer = LAYERS(shape, form)
    given = tokens_of(layer, rows)
    chosen = [layer.route(x)[1].int().contiguous() for x in given]
    hidden = [torch.randn(x.numel(), layer.experts_down.shape[2], device=x.device).bfloat16() for x in chosen]
    groups = [None if rows == 1 else grouping.group(x, layer.count, 8 if rows <= 64 else 32) for x in chosen]
    found = []
    for first, weight in ((True, coded(layer.experts_gate_up)), (False, coded(layer.experts_down))):
        names = ("C", "WK", "WM", "STAGES")
        kinds = itertools.product(((2, 4), (4, 2), (2, 2), (2, 1), (4, 1)), (1, 2, 4), (2, 3, 5))
        shapes = [dict(zip(names, (*sums, pairs, stages), strict=True)) for sums, pairs, stages in kinds]
        sets = [
            [
                partial(
                    quantised_products.multiply_experts, x if first else h, weight,
                    quantised_products.Pairs(c.view(-1), layer.active if first else 1, g), gated=first, shape=one,
                )
                for x, h, c, g in zip(given, hidden, chosen, groups, strict=True)
            ]
            for one in shapes
        ]  # fmt: skip
        with overlapping():
            compile_only(lambda sets=sets: [calls[0]() for calls in sets])  # type: ignore[misc]
        if not rounds:
            continue
        own = []
        for one, calls in zip(shapes, sets, strict=True):
            try:
                us = microseconds(calls, rounds, True)
            except Exception as error:  # it does not compile, or needs more memory than the device has
                print("failed", one, type(error).__name__, str(error)[:100], flush=True)
                continue
            head = {"shape": shape, "form": form, "rows": rows, "product": "enter" if first else "leave"}
            own.append(head | {"us": us} | one)
        own.sort(key=lambda x: x["us"])
        print(head, [(round(x["us"], 1), *(x[name] for name in names)) for x in own], flush=True)
        found += own
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path("bench/out/experts.json"))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=tuple(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--new", action="store_true", help="leave out torch's path")
    parser.add_argument("--parts", action="store_true", help="time each launch alone, in bfloat16")
    parser.add_argument("--tune", action="store_true", help="try configurations of the products")
    parser.add_argument("--step", action="store_true", help="time one row of a decoding step, in both ways")
    parser.add_argument("--compile", action="store_true", help="with --tune: only compile them")
    return parser.parse_args()


def main() -> None:
    args = parse()
    found: list[dict[str, Any]] = []
    for shape in args.shapes:
        if args.step:
            found.append(measure_step(shape, args.rounds))
            continue
        if args.tune or args.parts:
            for rows in args.rows:
                if args.parts:
                    found.append(measure_parts(shape, rows, args.rounds))
                rounds = 0 if args.compile else args.rounds
                for form in args.forms if args.tune else ():
                    if form == "bfloat16":
                        found += tune(shape, rows, rounds)
                    else:
                        found += tune_codes(shape, form, rows, rounds)
            continue
        for form, rows in itertools.product(args.forms, args.rows):
            found.append(measure(shape, form, rows, args.rounds, not args.new))
            print(found[-1], flush=True)
    if not (args.tune or args.parts or args.step):
        table = [
            [r["shape"], r["form"], str(r["rows"]), *(f"{r[x]:.1f}" if r[x] else "-" for x in ("old", "new", "bound")),
             f"{r['old'] / r['new']:.2f}x" if r["old"] and r["new"] else "-",
             f"{r['new'] / r['bound']:.2f}" if r["new"] else "-", f"{r.get('error', 0):.1e}"]
            for r in found
        ]  # fmt: skip
        names = ["shape", "weights", "rows", "old us", "new us", "bound us", "faster", "over the bound", "error"]
        show("a mixture of experts", names, table)
    head = {"date": datetime.now(UTC).date().isoformat(), "gpu": torch.cuda.get_device_name()}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"header": head, "records": found}, indent=1) + "\n")
    print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
