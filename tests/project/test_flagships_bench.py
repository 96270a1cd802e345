"""bench/models/flagships.py: its options."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench.models import flagships
from lineate.models import HybridLM, hybrid, preset, reading


@pytest.mark.parametrize(
    ("flag", "words", "wrong"),
    [
        ("--models", "kimi-linear-48b,huge", "'huge'"),
        ("--weights", "bf16,int3", "'int3'"),
        ("--only", "decode,,prefills", "'', 'prefills'"),
    ],
)
def test_wrong_names_are_refused_before_anything_is_measured(flag, words, wrong, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flagships", flag, words])
    with pytest.raises(SystemExit):
        flagships.main()
    assert f"{flag} must be of " in (said := capsys.readouterr().err) and f"got {wrong}" in said


@pytest.mark.parametrize("words", ["8192,many", "", "2048", "16384,8200", "-8192"])
def test_pieces_of_a_wrong_size_are_refused(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["flagships", f"--piece={words}"])
    with pytest.raises(SystemExit):
        flagships.main()
    said = capsys.readouterr().err
    assert "--piece: must be numbers of tokens from 4096 on, multiples of 64" in said and repr(words) in said


def test_prompts_are_read_in_the_pieces_of_the_option(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ids, usual, own = SimpleNamespace(is_cuda=True, numel=lambda: 30000, device="cuda"), reading.PIECE, hybrid.piece_of
    with torch.no_grad():
        for piece, wanted in zip(flagships.parse_pieces("8192,16384,32768"), (8192, 16384, None), strict=True):
            with flagships.read_in_pieces(piece) as sizes:
                assert hybrid.piece_of(ids, nn.ModuleList(), [], alone=False) == wanted  # type: ignore[arg-type]
            assert sizes == [30000 if wanted is None else wanted]
        model, tokens = HybridLM(preset("tiny")).eval(), torch.zeros(1, 30, dtype=torch.long)
        with flagships.read_in_pieces(8192) as sizes:
            model(tokens, last_only=True)
    assert sizes == [30], "the model asks for the size"
    assert usual == reading.PIECE and hybrid.piece_of is own


def test_only_prompts_longer_than_the_smallest_piece_are_repeated(monkeypatch):
    found = []

    class Recorded:
        own, made = 0, 0.0

        def __init__(self, *_: object) -> None:
            pass

        def prefill(self, tokens: int, piece: int | None = None) -> None:
            found.append((tokens, piece))

    monkeypatch.setattr(flagships, "Bench", Recorded)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**50, 2**50))
    flagships.measure("tiny", "bf16", ("prefill",), False, found.append, (8192, 32768))
    assert found == [(4096, 8192), (32768, 8192), (32768, 32768), (131072, 8192), (131072, 32768)]
    found.clear()
    flagships.measure("tiny", "bf16", ("prefill",), False, found.append)
    assert found == [(4096, None), (32768, None), (131072, None)]
