"""Drafters guess the tokens that follow; the model reads all guesses in one pass and keeps those that it would choose.

    guesses = drafter.propose(rows, most=4)                  # a few tokens for each row
    out = model.trail(ids, state)                            # row r of ids: its last token, then its guesses
    chosen = verify(out.logits, guesses, sampling, positions)
    state = out.trail.after(torch.tensor([len(tokens) for tokens in chosen]))

A token is a pure function of its logits, the options, the seed and its position (generation/choice.py). So verify
compares a guess with the very token that plain decoding would choose there: guesses change how fast tokens come, never
which. A drafter that is a model draws with the same noise, and so guesses right more often than by chance.
"""

from lineate.serving.drafting.draft_model import DraftModel
from lineate.serving.drafting.drafter import Drafter, DraftRow, verify
from lineate.serving.drafting.lookup import PromptLookup

__all__ = ["DraftModel", "DraftRow", "Drafter", "PromptLookup", "verify"]
