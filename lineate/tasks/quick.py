"""`lineate tasks --quick`: for every task, sizes at which a minute or two on a laptop show its point."""

from dataclasses import dataclass
from typing import Any

SMALL_RUN: dict[str, Any] = {
    "width": 32, "layers": 1, "init": 0.18, "seeds": 1, "rows": 32, "lr": 1e-2, "steps": 400, "curriculum": 4,
    "eval_every": 100, "test_rows": 128, "stop_at": 0.99,
}  # fmt: skip
"""One layer, one head of 32 channels; first weights of deviation 1 / sqrt(32) learn sooner than those of 0.02."""

WORDS = SMALL_RUN | {
    "width": 64, "heads": 4, "init": 0.02, "lr": 3e-3, "length": 32, "conv": 0, "decay": False, "curriculum": 1,
    "steps": 500, "stop_at": 2.0,
}  # fmt: skip
"""Word problems of groups: no convolution and no decay, so that a token is n writes and nothing else."""
STREAM = SMALL_RUN | {
    "rules": "linear,deltanet,gdn2", "length": 32, "conv": 0, "curriculum": 1, "stop_at": 2.0,
}  # fmt: skip
"""Streams of changes and questions."""


@dataclass(frozen=True)
class Quick:
    """The quick version of a task."""

    flags: dict[str, Any]
    """Options of the command, in place of those that were not given."""
    look: str
    """The figures of the table to compare; docs/tasks.md has measurements."""


QUICK = {
    "recall": Quick(
        SMALL_RUN | {"rules": "linear,deltanet,gdn,kda", "length": 48, "pairs": 12, "vocab": 128, "steps": 600},
        "look for: rules that correct recall nearly all pairs; linear attention, which only adds, mixes them up",
    ),
    "overwriting": Quick(
        SMALL_RUN | {"rules": "linear,deltanet,gdn,kda", "length": 40, "pairs": 4, "writes": 3, "vocab": 64},
        "look for: rules that correct answer with the latest value; one that only adds cannot take a value back",
    ),
    "needle": Quick(
        SMALL_RUN | {"rules": "linear,gdn,softmax", "length": 64, "vocab": 64, "curriculum": 8},
        "look for: one pair is no load, every rule finds it; longer rows than it was trained on show which keeps it",
    ),
    "copying": Quick(
        SMALL_RUN | {"rules": "linear,gdn,softmax", "length": 32, "vocab": 32},
        "look for: softmax attention, which keeps every token, copies all; fixed memories lose some, linear the most",
    ),
    "selective-copying": Quick(
        SMALL_RUN | {"rules": "linear,gdn,softmax", "length": 32, "pairs": 4, "vocab": 18},
        "look for: a gate, which chooses what to keep, is ahead; one layer and so few steps do not solve the task",
    ),
    "induction": Quick(
        SMALL_RUN | {"rules": "linear,gdn,softmax", "length": 32, "vocab": 32},
        "look for: the short convolution sees what followed the mark; softmax attention has none, and one layer of it "
        "guesses",
    ),
    "erasing": Quick(
        STREAM,
        "look for: rules that correct are ahead, because they set a key anew; erasing alone is writing zero",
    ),
    "adding": Quick(
        STREAM | {"length": 64, "keys": 2},
        "look for: separate rates of erasing and writing (gdn2) are ahead of one beta, which erases what it adds to",
    ),
    "parity": Quick(
        SMALL_RUN | {"rules": "deltanet,deltanet-2", "length": 20, "conv": 0, "curriculum": 1, "stop_at": 2.0},
        "look for: with beta in (0, 2) parity holds at four times the length; with beta in (0, 1) it is guessed",
    ),
    "counting": Quick(
        SMALL_RUN | {"rules": "deltanet,deltanet-2", "length": 20, "modulus": 3, "stop_at": 2.0},
        "look for: nothing better than a guess (33%): so small a model learns no count modulo 3; see parity, modulo 2",
    ),
    "arithmetic": Quick(
        SMALL_RUN | {"rules": "deltanet,deltanet-2,product-2", "length": 20, "modulus": 3, "stop_at": 2.0},
        "look for: nothing much better than a guess (33%): so small a model does not learn to calculate",
    ),
    "s3": Quick(
        WORDS | {"rules": "product1-2,product2,product2-2"},
        "look for: two writes a token with beta in (0, 2) hold the product; one write, or beta in (0, 1), does not",
    ),
    "s4": Quick(
        WORDS | {"rules": "product1-2,product2-2,product3-2"},
        "look for: nothing better than a guess (4%): so few steps do not suffice; see s3",
    ),
    "a5": Quick(
        WORDS | {"rules": "product1-2,product2-2,product3-2"},
        "look for: nothing better than a guess (2%): so few steps do not suffice; see s3",
    ),
    "s5": Quick(
        SMALL_RUN | {"rules": "deltanet,deltanet-2", "length": 12, "stop_at": 2.0},
        "look for: nothing much better than a guess: so small a model does not learn to compose permutations",
    ),
}
