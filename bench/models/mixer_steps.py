"""Milliseconds per token of small models of one mixer each, on a CPU: its step in C compared with calling the mixer.

    python -m bench.models.mixer_steps [--json FILE] [--patterns DRSLGK] [--layers 12] [--weights float32 int8 int4]

Both models have the same weights and take turns. The mixers of the second one are of a subclass, which a step calls
(lineate/layers/step/spec.py); its feed-forwards, norms and head run in C in both.
"""

import argparse
import copy
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.timing import OtherProcesses, cpu_model, given_command, interleave, show
from lineate.layers import kind_of
from lineate.models import FeedConfig, HybridConfig, HybridLM, LinearConfig, MambaConfig
from lineate.quantised.which import shrink

VOCAB = 8192


def make(letter: str, layers: int, hidden: int, weights: str) -> HybridLM:
    """Return a model of one mixer; Mamba-2's blocks have no feed-forward, as in the published models."""
    torch.manual_seed(0)
    heads = hidden // 128
    model = HybridLM(
        HybridConfig(
            vocab_size=VOCAB, hidden_size=hidden, n_layers=layers, pattern=letter,
            linear=LinearConfig(heads, heads, 128, 128), mamba=MambaConfig(2 * hidden // 64, 64, 128),
            feed=FeedConfig(7 * hidden // 2), mixer_only=tuple(range(layers)) if letter == "S" else (),
        )
    ).eval()  # fmt: skip
    return model if weights == "float32" else shrink(model, weights)  # type: ignore[return-value]


def called(model: HybridLM) -> HybridLM:
    """Return a copy with the same weights, whose mixers are called."""
    other = copy.deepcopy(model, {id(x): x for x in model.parameters()})
    for block in other.layers:
        mixer: Any = block.mixer
        mixer.__class__ = type("Called", (type(mixer),), {})
    return other


@torch.inference_mode()
def measure(letter: str, layers: int, hidden: int, weights: str, rows: int, rounds: int) -> dict[str, Any]:
    """Return the seconds per token of both models, and the difference of their logits after the same tokens."""
    ours = make(letter, layers, hidden, weights)
    models = {"step": ours, "called": called(ours)}
    ids = torch.randint(VOCAB, (rows, 64), generator=torch.Generator().manual_seed(0))
    states = {key: model(ids, last_only=True).state for key, model in models.items()}
    logits: dict[str, Tensor] = {}

    def decode(key: str) -> Tensor:
        out = models[key](ids[:, -1:], state=states[key])
        states[key] = out.state
        return out.logits

    samples = interleave(
        {key: lambda key=key: decode(key) for key in models}, rounds=rounds, budget=60.0,
        inspect=lambda key, found: logits.__setitem__(key, found),
    )  # fmt: skip
    apart = (logits["step"] - logits["called"]).abs().max() / logits["called"].abs().max()
    return {
        "mixer": kind_of(letter).name, "letter": letter, "layers": layers, "hidden": hidden, "weights": weights,
        "rows": rows, "step_ms": 1e3 * samples["step"].median, "called_ms": 1e3 * samples["called"].median,
        "step_least_ms": 1e3 * samples["step"].minimum, "called_least_ms": 1e3 * samples["called"].minimum,
        "ratio": samples["called"].median / samples["step"].median, "difference": apart.item(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--patterns", default="DRSLGK")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--weights", nargs="+", default=["float32", "int8", "int4"])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    others = OtherProcesses()
    found = [
        measure(letter, given.layers, given.hidden, weights, given.rows, given.rounds)
        for letter in given.patterns
        for weights in given.weights
    ]
    busy = others.cores() or 0.0
    sizes = f"{given.layers} layers, hidden {given.hidden}, {given.rows} rows"
    show(
        f"{cpu_model()}, {torch.get_num_threads()} threads, {sizes}; others keep {busy:.1f} cores busy",
        ["mixer", "weights", "step ms", "called ms", "ratio", "difference"],
        [
            [
                x["mixer"], x["weights"], f"{x['step_ms']:.2f}", f"{x['called_ms']:.2f}", f"{x['ratio']:.2f}",
                f"{x['difference']:.1e}",
            ]
            for x in found
        ],
    )  # fmt: skip
    if given.json is not None:
        about = {
            "command": given_command(), "cpu": cpu_model(), "threads": torch.get_num_threads(),
            "torch": torch.__version__, "other_cores": busy, "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }  # fmt: skip
        given.json.write_text(json.dumps({"about": about, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
