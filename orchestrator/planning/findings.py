"""Results of the checks before a sweep."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from orchestrator.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check.

    Attributes:
        message: what is there, or what is wrong and what to do about it.
    """

    check: str
    ok: bool
    message: str


def run_check(check: str, work: Callable[[], str]) -> Finding:
    try:
        return Finding(check=check, ok=True, message=work())
    except (UsageError, OSError) as error:
        return Finding(check=check, ok=False, message=str(error))


def require(findings: Iterable[Finding]) -> None:
    """Raises UsageError if a check failed, with all that failed."""
    failed = [f"{finding.check}: {finding.message}" for finding in findings if not finding.ok]
    if failed:
        raise UsageError("\n  ".join(["the sweep cannot start:", *failed]) if len(failed) > 1 else failed[0])
