"""Findings: run one by one, each within a time limit, whatever the others met; as a table and as JSON."""

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeVar

from orchestrator.errors import UsageError

T = TypeVar("T")
Status = Literal["ok", "warn", "fail", "skip"]
WORST_FIRST: tuple[Status, ...] = ("fail", "warn", "skip", "ok")
LIMIT_S = 15.0  # of a check that asks one server or this machine
NODES_LIMIT_S = 75.0  # of one that asks every node: the first worker process of a node takes a while


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Attributes:
    way_out: what to do about it; empty where nothing is to be done.
    """

    check: str = ""
    status: Status
    found: str
    way_out: str = ""


def ok(found: str) -> Finding:
    return Finding(status="ok", found=found)


def warn(found: str, way_out: str) -> Finding:
    return Finding(status="warn", found=found, way_out=way_out)


def fail(found: str, way_out: str = "") -> Finding:
    return Finding(status="fail", found=found, way_out=way_out)


class Skipped(Exception):
    """A check that cannot be run, for what it needs is not there."""


def need(value: T | None, name: str) -> T:
    """`value`. Raises Skipped if an earlier check did not get it."""
    if value is None:
        raise Skipped(f"needs: {name}")
    return value


class Examination:
    """Runs checks and keeps what they find. Attributes:
    stuck: whether a check that passed its limit still waits, in a thread that nothing can end.
    """

    def __init__(self, tell: Callable[[Finding], None]) -> None:
        self.findings: list[Finding] = []
        self.stuck = False
        self._tell = tell

    def check(self, name: str, work: Callable[[], Finding], *, limit_s: float | None = LIMIT_S) -> None:
        """`limit_s` None: in this very thread."""
        self.obtain(name, work, lambda finding: finding, limit_s=limit_s)

    def obtain(
        self,
        name: str,
        work: Callable[[], T],
        describe: Callable[[T], Finding],
        *,
        limit_s: float | None = LIMIT_S,
    ) -> T | None:
        """What `work` returns, for later checks; None if it raised, was too slow, or was found unusable."""
        value, finding = self._run(work, describe, limit_s)
        found = masked(finding.found).strip()
        finding = replace(finding, check=name, found=found, way_out=masked(finding.way_out))
        self.findings.append(finding)
        self._tell(finding)
        return value if finding.status != "fail" else None

    def failed(self) -> bool:
        return any(finding.status == "fail" for finding in self.findings)

    def _run(
        self, work: Callable[[], T], describe: Callable[[T], Finding], limit_s: float | None
    ) -> tuple[T | None, Finding]:
        try:
            value = work() if limit_s is None else self._within(work, limit_s)
            return value, describe(value)
        except Skipped as reason:
            return None, Finding(status="skip", found=str(reason))
        except TimeoutError as error:
            return None, fail(str(error) or "a wait was given up", "see whether what it asks is up and near")
        except (UsageError, OSError) as error:  # they say themselves what to do
            return None, fail(str(error))
        except Exception as error:  # that a check crashes is its finding
            return None, fail(f"raised {type(error).__name__}: {first_line(error)}")

    def _within(self, work: Callable[[], T], limit_s: float) -> T:
        """Raises TimeoutError."""
        returned: list[T] = []
        raised: list[BaseException] = []

        def run() -> None:
            try:
                returned.append(work())
            except BaseException as error:  # raised again by who waits
                raised.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(limit_s)
        if raised:
            raise raised[0]
        if not returned:
            self.stuck = True
            raise TimeoutError(f"no answer in {limit_s:g} s")
        return returned[0]


def masked(text: str) -> str:
    """Without the users and passwords of URIs, and without values that are named like secrets."""
    text = re.sub(r"://[^/\s'\"]*@", "://***@", text)
    return re.sub(r"(?i)((?:password|secret|token|access_key)\w*=)[^\s&;,'\"]+", r"\1***", text)


def first_line(error: BaseException) -> str:
    """Of what it says; of one that came from another process, what the error there says."""
    there = getattr(error, "cause", None)
    said = there if isinstance(there, Exception) else error
    return (str(said).strip() or repr(said)).splitlines()[0]


def by_node(found: Mapping[str, Any], bad: Mapping[str, str]) -> str:
    """``2 of 3 nodes: a: why; b: why``, of the nodes in `bad`."""
    return f"{len(bad)} of {len(found)} nodes: " + "; ".join(f"{name}: {why}" for name, why in bad.items())


def line(finding: Finding) -> str:
    """Of the table; what is to be done stands below."""
    way_out = f"\n{'':23}-> {finding.way_out}" if finding.way_out else ""
    return f"{finding.status:5} {finding.check:16} {finding.found}{way_out}"


def summary(findings: Iterable[Finding]) -> str:
    """How many of each."""
    statuses = [finding.status for finding in findings]
    return ", ".join(f"{statuses.count(status)} {status}" for status in WORST_FIRST if status in statuses)


def as_json(findings: Iterable[Finding]) -> str:
    found = list(findings)
    counts = {status: sum(one.status == status for one in found) for status in WORST_FIRST}
    return json.dumps({"findings": [asdict(one) for one in found], "counts": counts}, indent=1)
