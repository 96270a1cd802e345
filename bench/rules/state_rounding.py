"""How far decoding with bfloat16 states departs from float32: relative errors of states and outputs after many tokens.

    python -m bench.rules.state_rounding                 # 4 heads of 64, 4,096 tokens; a minute on a CPU

Keys and queries have unit length, values are normal, and beta is uniform in (0, 1). "not written" begins with a normal
memory and has beta = 0. The output's error is that of the 256 tokens before.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor

from lineate import decode

CASES: dict[str, tuple[str, float | None]] = {
    "Gated DeltaNet, decay e^-1": ("gdn", -1.0),
    "Gated DeltaNet, decay e^-0.1": ("gdn", -0.1),
    "Gated DeltaNet, decay e^-0.01": ("gdn", -0.01),
    "Gated DeltaNet, decay e^-0.001": ("gdn", -0.001),
    "Kimi Delta Attention, e^-1 to e^-0.001 by channel": ("kda", None),
    "gated linear attention, decay e^-0.001": ("gla", -0.001),
    "DeltaNet": ("delta", None),
    "linear attention": ("linear", None),
    "not written, decay e^-0.01": ("none", -0.01),
    "not written, decay e^-0.001": ("none", -0.001),
}
AT, PIECE = (1024, 4096), 256


def inputs(rule: str, decay: float | None, heads: int, size: int) -> tuple[Tensor | None, ...]:
    """Return q, k, v, log_decay and beta of a case."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, AT[-1], heads)
    q, k, v = (torch.randn(*shape, size, generator=generator) for _ in range(3))
    beta: Tensor | None = torch.rand(shape, generator=generator)
    log_decay = None if decay is None else torch.full(shape, decay)
    if rule == "kda":
        log_decay = -(10 ** (-3 * torch.rand(*shape, size, generator=generator)))
    if rule in ("gla", "linear"):
        beta = None
    if rule == "none":
        beta = torch.zeros(shape)
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, log_decay, beta


def errors(rule: str, decay: float | None, heads: int, size: int) -> list[str]:
    """Return the errors of states and outputs, to the nearest and stochastically, after each number of tokens."""
    tensors = inputs(rule, decay, heads, size)
    first = torch.randn(1, heads, size, size, generator=torch.Generator().manual_seed(1)).bfloat16()
    first = first if rule == "none" else torch.zeros_like(first)
    states = {"float32": first.float(), "nearest": first.clone(), "stochastic": first.clone()}
    cells = []
    for start in range(0, AT[-1], PIECE):
        piece = [None if x is None else x[:, start : start + PIECE] for x in tensors]
        outputs = {}
        for name, state in states.items():
            seeds = torch.tensor([start]) if name == "stochastic" else None
            rounding = "nearest" if seeds is None else name
            outputs[name] = decode(*piece, state=state, rounding=rounding, seeds=seeds)  # type: ignore[arg-type]
        if start + PIECE in AT:
            for found in (states, outputs):
                exact = found["float32"]
                for name in ("nearest", "stochastic"):
                    cells.append(f"{float((found[name].float() - exact).norm() / exact.norm()):.4f}")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--size", type=int, default=64, help="channels of a key and of a value")
    asked = parser.parse_args()
    head = [f"{what}, {how}, {n}" for n in AT for what in ("state", "output") for how in ("nearest", "stochastic")]
    print("| | " + " | ".join(head) + " |\n|---|" + "---|" * len(head))
    for name, (rule, decay) in CASES.items():
        print(f"| {name} | " + " | ".join(errors(rule, decay, asked.heads, asked.size)) + " |", flush=True)


if __name__ == "__main__":
    main()
