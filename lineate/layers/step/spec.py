"""The decoding step of a mixer with a fixed-size memory, as data that is declared once, in the mixer's row.

    q | k | v | columns = in_proj(x)                   q | k | v = silu(conv(q | k | v))
    S' = Diag(decay) S                                 r = beta (v - S'^T k), or v, or that of another rule
    S  = S' + k r^T                                    o = scale S^T q
    y  = out_proj(norm(o + D v) * act(gate))

The step in C on a CPU (native.py) and the step in few launches on a GPU (launches.py) read it.
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from lineate.rule import DecayShape, Rule

Column = Literal["gate", "decay", "write", "erase"]
"""The outputs of in_proj after q | k | v: the output gate, the raw decay, and the logits of beta, or of the gates write
and erase of gated_delta_rule_2."""
_COLUMNS: dict[str, Column] = {"log_decay": "decay", "beta": "write", "write": "write", "erase": "erase"}
"""The columns by the gates of rules, which are made from them."""
Features = Literal["plain", "unit", "map"]
"""How the rule uses q and k: unchanged, with norm 1, or through the mixer's `feature_map`."""
DecayGate = Literal["none", "speed", "sigmoid", "step"]
"""The function from the raw decay a to the decay:

    speed      exp(-exp(A_log) softplus(a + dt_bias)), or, if the mixer has a gate_lower_bound,
               exp(gate_lower_bound sigmoid(exp(A_log) (a + dt_bias)))
    sigmoid    sigmoid(a)^(1 / temperature)
    step       exp(-exp(A_log) dt), with dt = softplus(a + dt_bias) within step_least .. step_most; dt multiplies v too
"""


@dataclass(frozen=True)
class StepSpec:
    """The computation of one token of a linear mixer.

    Sizes, parameters and constants such as the scale are attributes of the mixer, with the same names in all of them
    (`LinearMixer`).

    Args:
        mixer: the class whose forward this describes; a subclass of it may compute something else.
        rule: the rule that runs, which says whether the write is corrected.
        columns: the outputs of in_proj after q | k | v, in this order.
        features: how the rule uses q and k.
        decay: the shape of the decay.
        decay_gate: the function from the raw decay to the decay.
        low_rank: the gates that may have a projection of low rank behind in_proj, the mixer's decay_proj and gate_proj.
        divides: whether the output is divided by q . (sum of keys), which is the last column of the memory.
        skips: whether D v is added to the output, with the mixer's D `hv`.
        grouped: whether the norm is one over groups of all heads' channels (mamba2.GroupedGatedNorm), not one a head.
    """

    mixer: type[nn.Module]
    rule: Rule
    columns: tuple[Column, ...]
    features: Features = "plain"
    decay: DecayShape = "none"
    decay_gate: DecayGate = "none"
    low_rank: tuple[Literal["gate", "decay"], ...] = ()
    divides: bool = False
    skips: bool = False
    grouped: bool = False

    def describes(self, mixer: nn.Module) -> bool:
        """Whether this is what one token of a mixer computes.

        That is one of the class, with as many columns, and without a rate that depends on keys.
        """
        if type(mixer) is not self.mixer or getattr(mixer, "rate", "beta") != "beta":
            return False
        return len(getattr(mixer, "gates", self.columns)) == len(self.columns)

    def __post_init__(self) -> None:
        """Raise unless the columns are those that the rule reads."""
        if self.decay not in self.rule.decays:
            raise ValueError(
                f"decay must be one of {', '.join(self.rule.decays)} with {self.rule.name}, got {self.decay!r}"
            )
        if unknown := [name for name in self.rule.gates if name not in _COLUMNS]:
            raise ValueError(
                f"rule must have gates that are columns of in_proj, got {self.rule.name} with {', '.join(unknown)}; "
                "leave step=None"
            )
        wanted = {"gate", *(_COLUMNS[x] for x in self.rule.gates if x != "log_decay" or self.decay != "none")}
        if set(self.columns) != wanted or len(self.columns) != len(wanted):
            raise ValueError(
                f"columns must have each of {', '.join(sorted(wanted))} once with {self.rule.name} and decay "
                f"{self.decay!r}, got {self.columns}"
            )
        added = {"divides": self.divides, "skips": self.skips, "decay_gate 'step'": self.decay_gate == "step"}
        if self.rule.corrects and any(added.values()):
            given = next(name for name, value in added.items() if value)
            raise ValueError(
                f"{given} must be left out with {self.rule.name}: steps compute it for rules that accumulate alone"
            )
        if (self.decay == "none") != (self.decay_gate == "none"):
            raise ValueError(
                f"decay_gate must be 'none' if decay is, and only then, got {self.decay_gate!r} with {self.decay!r}"
            )
