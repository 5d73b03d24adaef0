"""The flags of the wings' commands and evaluations: every mistake is one line."""

import sys

import pytest

from jobs._flags import parse
from jobs.evaluate import EvaluateFlags
from tests.jobs.test_flags import refused
from wings.jobs.finetune import FineTuneFlags


@pytest.mark.parametrize(
    ("flags", "words", "message"),
    [
        (EvaluateFlags, "soft --page x", "--page does nothing without --retrieval"),
        (EvaluateFlags, "soft --zero-shot x --page y", "--page does nothing with --zero-shot"),
        (EvaluateFlags, "soft --zero-shot x --grid", "--grid and --zero-shot exclude each other"),
        (FineTuneFlags, "soft", "name the images by --data, or by --suite, and not by both"),
        (FineTuneFlags, "soft --data d --suite s", "by --suite, and not by both"),
        (FineTuneFlags, "soft --data d --root r", "--root r is for the paths in a --suite"),
    ],
)
def test_mistakes_of_commands(
    flags: type, words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(flags, words.split(), monkeypatch, capsys)


def test_one_set_takes_several_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["job", "soft", "--data", "d", "--set", "train.steps=9", "train.lr=1"]
    monkeypatch.setattr(sys, "argv", words)
    assert parse(FineTuneFlags, "").set == (("train.steps", "9"), ("train.lr", "1"))
