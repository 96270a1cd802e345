"""The single figures of docs/memory.md, sections 3 to 7 and 9, that no results file contains.

python -m bench.memories.figures             prints all of them; about a minute on one thread
python -m bench.memories.figures --only 5    prints those of one section

Inputs are random with fixed seeds, float64 unless a line says otherwise; another seed changes the last digits.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

import lineate
from lineate.memory import MEMORY_RULES, run_reference
from lineate.memory.lact import lact, lact_state
from lineate.memory.least_squares import least_squares
from lineate.memory.parts import orthogonalise
from lineate.memory.titans import titans
from lineate.memory.ttt import ttt

Lines = Iterator[str]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def units(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(draw(*shape, seed=seed), dim=-1)


def apart(x: Tensor, y: Tensor) -> float:
    """Return the distance of x from y, divided by the length of y."""
    return float((x.detach().double() - y.detach()).norm() / y.detach().norm())


def tokens(t: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    return units(1, t, 1, d), units(1, t, 1, d, seed=1), draw(1, t, 1, d, seed=2)


def section_3() -> Lines:
    """Least squares: float32 and float64, the ridge, DeltaNet by repetition."""
    q, k, v = tokens(256, 32)
    for kept in (0.99, 0.74):
        log_decay = torch.full((1, 256, 1), kept, dtype=torch.float64).log()
        exact, _ = least_squares(q, k, v, log_decay, form="recurrent")
        low = [x.float() for x in (q, k, v, log_decay)]
        for form in ("chunkwise", "recurrent"):
            found, _ = least_squares(*low, form=form)
            yield f"lambda {kept}, float32, {form}: relative error {apart(found, exact):.1e}"
    for t in (2048, 4096):
        q, k, v = tokens(t, 16)
        k[:, 512:] = k[:, 511:512]
        log_decay = torch.full((1, t, 1), 0.99, dtype=torch.float64).log()
        for restore in (False, True):
            _, state = least_squares(q, k, v, log_decay, restore=restore, form="recurrent")
            largest = float(torch.linalg.eigvalsh(state["P"]).max())
            yield f"{t} tokens, restore={restore}: largest eigenvalue of P {largest:.1e}"
    k, v = units(1, 32, 1, 64), draw(1, 32, 1, 64, seed=1)
    for passes in (1, 4, 16, 64):
        many = k.repeat(1, passes, 1, 1), v.repeat(1, passes, 1, 1)
        beta = torch.ones(1, 32 * passes, 1, dtype=torch.float64)
        _, state = lineate.delta_rule(many[0], *many, beta)
        error = apart(torch.einsum("bthk,bhkv->bthv", k, state.double()), v)
        yield f"32 pairs, DeltaNet after {passes} passes: relative error {error:.2g}"
    _, fit = least_squares(k, k, v, ridge=1e-12)
    yield f"least squares after one: {apart(torch.einsum('bthk,bhkv->bthv', k, fit['S']), v):.1e}"


def section_4() -> Lines:
    """TTT: the gradient through the layer norm without the two subtracted means."""
    z, target = draw(1000, 32).requires_grad_(), draw(1000, 32, seed=1)
    loss = (F.layer_norm(z, (32,)) - target).square().sum() / 2
    (exact,) = torch.autograd.grad(loss, z)
    with torch.no_grad():
        partial = (F.layer_norm(z, (32,)) - target) / z.std(-1, correction=0, keepdim=True)
        yield f"without the means the gradient is wrong by {100 * apart(partial, exact):.0f} % of its length"


def section_5() -> Lines:
    """Titans next to DeltaNet, and the price of a chunk."""
    q, k, v = tokens(256, 16)
    theta, none = draw(1, 256, 1, seed=3).sigmoid(), torch.zeros(1, 256, 1, dtype=torch.float64)
    found, _ = titans(q, k, v, theta, none, none, chunk=1)
    expected, _ = lineate.delta_rule(q, k, v, theta, scale=1.0)
    yield f"eta = alpha = 0, chunk 1, from DeltaNet: {apart(found, expected):.0e}"
    alpha = torch.full_like(theta, 0.05)
    found, _ = titans(q, k, v, theta, none, alpha, chunk=1)
    expected, _ = lineate.gated_delta_rule(q, k, v, (1 - alpha).log(), theta, scale=1.0)
    yield f"alpha .05, from Gated DeltaNet: {100 * apart(found, expected):.1f} %"
    same, value = k[:, :1].expand_as(k), v[:, :1].expand_as(v)
    yield f"256 equal tokens, chunk 16, a value of length {float(value[0, 0].norm()):.2f}; length of the last answer:"
    for rate in (0.1, 0.13, 0.2):
        y, _ = titans(same, same, value, torch.full_like(theta, rate), none, none)
        yield f"    theta {rate}: {float(y[0, -1].norm()):.3g}"


def section_6() -> Lines:
    """LaCT: rates under Muon, and what five Newton-Schulz steps make of singular values."""
    q, k, v = tokens(256, 16)
    state = lact_state([draw(1, 16, 16, seed=i) / 4 for i in (4, 5, 6)], 1)
    rates = torch.ones(1, 256, 1, 3, dtype=torch.float64)
    once, _ = lact(q, k, v, rates, None, state, chunk=32)
    tenfold, _ = lact(q, k, v, 10 * rates, None, state, chunk=32)
    yield f"all rates times 10 change the outputs by {apart(tenfold, once):.1e}"
    shares = torch.logspace(-4, -0.01, 2000, dtype=torch.float64)
    found = torch.stack([_singular(share) for share in shares])
    for least in (0.01, 0.003):
        part = found[shares >= least]
        yield f"singular values from {least} of the norm up become [{float(part.min()):.3f}, {float(part.max()):.3f}]"
    for share in (0.001, 0.0001):
        yield f"one of {share} becomes {float(_singular(torch.tensor(share, dtype=torch.float64))):.2g}"


def _singular(share: Tensor) -> Tensor:
    """Return the new value of a singular value with this share of the Frobenius norm, next to one that has the rest."""
    return orthogonalise(torch.diag(torch.stack(((1 - share.square()).sqrt(), share))))[1, 1]


def section_7() -> Lines:
    """Measure how far a sequence that is split anywhere differs from the whole."""
    q, k, v = tokens(256, 16)
    gate, weight, bias = draw(1, 256, 1, seed=3).sigmoid(), draw(1, 16, 16, seed=4) / 4, draw(1, 16, seed=5) / 4
    ones, zeros = torch.ones(1, 16, dtype=torch.float64), torch.zeros(1, 16, dtype=torch.float64)
    small = lact_state([draw(1, 16, 16, seed=i) / 4 for i in (4, 5, 6)], 1)
    forms: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]]] = {
        "least squares": lambda p, s: least_squares(q[:, p], k[:, p], v[:, p], -0.1 * gate[:, p], state=s),
        "TTT-Linear": lambda p, s: ttt(
            q[:, p], k[:, p], v[:, p], gate[:, p] / 16, ones, zeros, s or {"weight1": weight, "bias1": bias}
        ),
        "Titans": lambda p, s: titans(q[:, p], k[:, p], v[:, p], 0.1 * gate[:, p], gate[:, p], 0.1 * gate[:, p], s),
        "LaCT": lambda p, s: lact(
            q[:, p], k[:, p], v[:, p], gate[:, p, :, None].expand(-1, -1, -1, 3), gate[:, p], s or small, chunk=64
        ),
    }
    for name, run in forms.items():
        whole, _ = run(slice(0, 256), None)
        worst = 0.0
        for cut in (1, 15, 100, 128, 255):
            first, state = run(slice(0, cut), None)
            second, _ = run(slice(cut, 256), state)
            worst = max(worst, apart(torch.cat((first, second), 1), whole))
        yield f"{name}, five cuts of 256 tokens: at most {worst:.0e}"


def section_9() -> Lines:
    """Measure the errors of formulas that are found elsewhere."""
    k, v, kept = units(256, 32), draw(256, 32, seed=1), 0.98
    for divided in (False, True):
        P, S = torch.eye(32, dtype=torch.float64) / 0.01, torch.zeros(32, 32, dtype=torch.float64)
        for i in range(256):
            P = P - P @ torch.outer(k[i], k[i]) @ P / (kept + k[i] @ P @ k[i])
            P = P / kept if divided else P
            S = S + torch.outer(P @ k[i], v[i] - k[i] @ S)
        weight = kept ** torch.arange(255, -1, -1, dtype=torch.float64)
        H = (weight[:, None] * k).T @ k + 0.01 * kept**256 * torch.eye(32, dtype=torch.float64)
        exact = torch.linalg.solve(H, (weight[:, None] * k).T @ v)
        yield f"least squares, P {'divided' if divided else 'not divided'} by lambda: S is {apart(S, exact):.1e} away"
    for deviation in (0.02, 0.1, 1.0):
        z, target = (deviation * draw(1000, 64)).requires_grad_(), draw(1000, 64, seed=1)
        (exact,) = torch.autograd.grad((F.layer_norm(z, (64,)) - target).square().sum() / 2, z)
        x = z.detach() - z.detach().mean(-1, keepdim=True)
        std = (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        x = x / std
        g = x - target
        found = 64 * g - g.sum(-1, keepdim=True) / (std * 64) - x * (g * x).sum(-1, keepdim=True) / (std * 64)
        cosine = float(F.cosine_similarity(found.flatten(), exact.flatten(), dim=0))
        wrong = f"wrong by {apart(found, exact):.2g} of its length, cosine {cosine:.2f}"
        yield f"layer norm, deviation {deviation}: {wrong}"
    q, k, v = tokens(256, 32)
    gates = {"rate": draw(1, 256, 1, seed=3).sigmoid() / 2, "momentum": torch.zeros(1, 256, 1, dtype=torch.float64)}
    rule, zeros = MEMORY_RULES["Titans"], torch.zeros(1, 32, 32, dtype=torch.float64)
    one, many = (run_reference(replace(rule, chunk=c), q, k, v, gates, {"S": zeros})[0] for c in (1, 64))
    yield f"Titans at chunk 64 is {100 * apart(many, one):.0f} % away from chunk 1"


SECTIONS = {"3": section_3, "4": section_4, "5": section_5, "6": section_6, "7": section_7, "9": section_9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, help="one section of docs/memory.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for number, section in SECTIONS.items():
        if options.only in (None, number):
            print(f"section {number}: {(section.__doc__ or '').strip()}")
            for line in section():
                print(f"    {line}")


if __name__ == "__main__":
    main()
