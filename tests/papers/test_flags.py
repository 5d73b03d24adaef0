"""The flags of the papers' commands: every mistake is one line."""

import pytest

from papers.jobs.inspect_routing import InspectFlags
from papers.jobs.study import StudyFlags
from tests.jobs.test_flags import refused


@pytest.mark.parametrize(
    ("flags", "words", "message"),
    [
        (InspectFlags, "soft --layers last", "--layers: 'last': write numbers"),
        (InspectFlags, "soft --capacities 0", "--capacities (0.0,): each must be above 0"),
        (StudyFlags, "k --stop-at 0.9", "--stop-at is a flag of the study specialisation, not of k"),
        (StudyFlags, "specialisation --stop-at 95", "--stop-at 95.0 must lie between 0 and 1"),
    ],
)
def test_mistakes_of_commands(
    flags: type, words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(flags, words.split(), monkeypatch, capsys)
