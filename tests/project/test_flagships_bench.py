"""bench/models/flagships.py: its options."""

import sys

import pytest

from bench.models import flagships


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
