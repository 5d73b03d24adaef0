"""Entries on disk, by hand."""

from pathlib import Path

import pytest

from orchestrator.tracking import journal
from orchestrator.tracking.journal import Journal


def entries(*numbers: int) -> list[dict[str, int]]:
    return [{"n": n} for n in numbers]


def test_entries_come_in_order_and_once(tmp_path: Path) -> None:
    one = Journal(tmp_path)
    for entry in entries(1, 2, 3):
        one.append(entry)
    assert (one.read(2), one.waiting) == (entries(1, 2), 3)
    one.advance(2)
    assert (one.read(2), one.waiting) == (entries(3), 1)
    one.append({"n": 4})
    one.advance(1)  # of what was read
    assert one.read(9) == entries(4)


def test_the_next_process_goes_on(tmp_path: Path) -> None:
    one = Journal(tmp_path)
    for entry in entries(1, 2, 3):
        one.append(entry)
    one.read(1)
    one.advance(1)
    one.read(1)  # not delivered when it is killed
    other = Journal(tmp_path)
    assert (other.waiting, other.read(9)) == (2, entries(2, 3))


def test_a_line_that_is_not_whole_was_never_said(tmp_path: Path) -> None:
    """Killed in the middle of the third entry."""
    one = Journal(tmp_path)
    for entry in entries(1, 2):
        one.append(entry)
    with (tmp_path / "journal.jsonl").open("a") as file:
        file.write('{"n": 3')
    other = Journal(tmp_path)
    other.append({"n": 4})
    assert (other.waiting, other.read(9)) == (3, entries(1, 2, 4))


def test_a_long_file_keeps_what_is_not_delivered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "KEPT", 100)
    one = Journal(tmp_path)
    for n in range(50):
        one.append({"n": n})
    one.read(20)
    one.advance(20)
    assert (one.waiting, one.read(99)) == (30, entries(*range(20, 50)))


@pytest.mark.parametrize("killed", [False, True])
def test_the_file_starts_anew(killed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stays small, however long the process runs; also if it dies before the position is 0 again."""
    monkeypatch.setattr(journal, "KEPT", 100)
    one = Journal(tmp_path)
    for n in range(50):
        one.append({"n": n})
        assert one.read(9) == entries(n)
        before = (tmp_path / "journal.jsonl").stat().st_size
        one.advance(1)
        if killed and before > 100:
            (tmp_path / "position").write_text(str(before))
            one = Journal(tmp_path)
    assert (tmp_path / "journal.jsonl").stat().st_size <= 100
    one.append({"n": 50})
    assert Journal(tmp_path).read(9) == entries(50)
