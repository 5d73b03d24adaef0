"""`jobs/doctor.py` as a user runs it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import doctor

Call = Callable[..., tuple[str, str]]


@pytest.mark.usefixtures("empty_home", "cluster")
def test_a_healthy_laptop(call: Call) -> None:
    code, out = call(doctor.main)
    assert code == ""
    assert out.splitlines()[-1] == "0 of 7 checks failed"
    assert "ok    tracking" in out


@pytest.mark.usefixtures("cluster")
def test_a_fault_as_json(call: Call, empty_home: Path) -> None:
    code, out = call(doctor.main, "--json", "--workers", "4")
    document = json.loads(out)  # nothing else is printed to stdout
    assert (code, document["failed"]) == ("1", 1)
    wrong = [one for one in document["findings"] if not one["ok"]]
    assert [one["check"] for one in wrong] == ["trials"]
    assert "the cluster has at most 2" in wrong[0]["message"]
