"""Findings: a check that crashes, hangs or cannot be run is one finding, and the others still run."""

import json
import threading

import pytest

from orchestrator.doctor.report import Examination, Finding, as_json, line, masked, need, ok, summary, warn
from orchestrator.errors import UsageError


@pytest.fixture
def told() -> list[Finding]:
    return []


@pytest.fixture
def doctor(told: list[Finding]) -> Examination:
    return Examination(told.append)


def test_a_crash_is_a_finding_and_the_next_check_runs(doctor: Examination, told: list[Finding]) -> None:
    def crash() -> Finding:
        raise ZeroDivisionError("by zero\nsecond line")

    def mistake() -> Finding:
        raise UsageError("use 2 workers")

    doctor.check("crash", crash)
    doctor.check("mistake", mistake)
    doctor.check("fine", lambda: ok("all"))
    assert [(f.check, f.status, f.found) for f in told] == [
        ("crash", "fail", "raised ZeroDivisionError: by zero"),
        ("mistake", "fail", "use 2 workers"),
        ("fine", "ok", "all"),
    ]
    assert doctor.failed()
    assert not doctor.stuck


def test_what_never_returns_is_given_up(doctor: Examination) -> None:
    never = threading.Event()
    value = doctor.obtain("server", lambda: never.wait() and 3, lambda _: ok("there"), limit_s=0.05)
    assert value is None
    assert doctor.stuck
    assert "no answer in 0.05 s" in doctor.findings[0].found
    never.set()


def test_what_needs_a_failed_check_is_skipped(doctor: Examination) -> None:
    def refuse() -> int:
        raise UsageError("no")

    got = doctor.obtain("cluster", refuse, lambda _: ok(""))
    doctor.check("clocks", lambda: ok(str(need(got, "a cluster"))))
    assert doctor.findings[1] == Finding(check="clocks", status="skip", found="needs: a cluster")


def test_secrets_are_masked(doctor: Examination) -> None:
    doctor.check(
        "store", lambda: warn("postgresql://me:s3cret@host/db refused", "RAY_AUTH_TOKEN=abc is wrong")
    )
    assert "s3cret" not in as_json(doctor.findings)
    assert "abc" not in as_json(doctor.findings)
    assert masked("s3://bucket/a@b and http://host:80/x@y") == "s3://bucket/a@b and http://host:80/x@y"


def test_table_and_json_say_the_same(doctor: Examination) -> None:
    doctor.check("disk", lambda: warn("1 % free", "free space"))
    doctor.check("python", lambda: ok("3.11"))
    found = json.loads(as_json(doctor.findings))
    assert found["counts"] == {"fail": 0, "warn": 1, "skip": 0, "ok": 1}
    assert found["findings"][0] == {
        "check": "disk",
        "status": "warn",
        "found": "1 % free",
        "way_out": "free space",
    }
    assert line(doctor.findings[0]).splitlines()[1].strip() == "-> free space"
    assert summary(doctor.findings) == "1 warn, 1 ok"
