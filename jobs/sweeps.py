"""List the sweeps and runs of a storage, stop one wherever it runs, or remove it everywhere.

python jobs/sweeps.py                                  # state, owner, age, arms, frontier, spent, size
python jobs/sweeps.py stop quickstart
python jobs/sweeps.py rm quickstart --dry-run          # from the storage, MLflow and its registry
python jobs/sweeps.py rm quickstart --keep frontier    # the checkpoints of other trials alone
python jobs/sweeps.py rm --orphans --dry-run           # what belongs to no run or sweep
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from jobs._cli import Places, command, print_table
from jobs._flags import flag, parse
from orchestrator.errors import UsageError
from orchestrator.names import run_name

if TYPE_CHECKING:
    from orchestrator.sweeps.overview import Entry


@dataclass(frozen=True, kw_only=True)
class SweepsFlags:
    action: Literal["list", "stop", "rm"] = flag("list", "what to do", positional=True, nargs="?")
    name: str | None = flag(
        None, "name of the sweep or the run to stop or remove", positional=True, nargs="?", read=run_name
    )
    json: bool = flag(False, "list: print a JSON list, figures in full")
    dry_run: bool = flag(False, "rm: say what would be removed, and remove nothing")
    keep: Literal["frontier"] | None = flag(
        None, "rm: remove only checkpoints of trials off the frontier of a sweep that is over"
    )
    orphans: bool = flag(
        False, "rm: in place of a name, what belongs to no run or sweep, in the storage and in MLflow"
    )
    places: Places

    def __post_init__(self) -> None:
        of = {"--json": (self.json, "list"), "--dry-run": (self.dry_run, "rm")}
        of |= {"--keep": (self.keep, "rm"), "--orphans": (self.orphans, "rm")}
        for name, (given, action) in of.items():
            if given and self.action != action:
                raise UsageError(f"{self.action} takes no {name}, which is a flag of {action}")
        if self.keep and self.orphans:
            raise UsageError("rm --orphans takes no --keep, which is for one sweep")
        if (self.action != "list" and not self.orphans) != bool(self.name):
            needs = (
                "needs the name of a sweep or a run" if not self.name else f"takes no name, got {self.name}"
            )
            raise UsageError(f"{self.action}{' --orphans' if self.orphans else ''} {needs}")


def main() -> None:
    flags = parse(SweepsFlags, __doc__)
    doing = {"list": "listing", "stop": f"stopping {flags.name} in", "rm": "removing from"}[flags.action]
    to = sys.stderr if flags.json else sys.stdout
    with command(f"{doing} {flags.places.root()}", plugins=flags.places.plugin, to=to):
        {"list": list_all, "stop": stop, "rm": rm}[flags.action](flags)


def list_all(flags: SweepsFlags) -> None:
    from orchestrator.sweeps.overview import entries

    found = entries(flags.places.root())
    if flags.json:
        print(json.dumps([asdict(entry) for entry in found], indent=1))
        return
    columns = ("name", "state", "owner", "age", "arms", "frontier", "hours", "USD", "MB")
    print_table(columns, map(_row, found), left=3)
    total = sum(entry.size for entry in found) / 1e6
    print(f"{len(found)} runs and sweeps, {total:,.1f} MB")


def _row(entry: Entry) -> tuple[str, ...]:
    best = "" if entry.quality is None else f"{entry.quality_name} {entry.quality:.4g}"
    if entry.front:
        best = f"{entry.front} arms, best {best}, knee {entry.knee}"
    age = f"{entry.age_s / 86400:.1f} d" if entry.age_s > 86400 else f"{entry.age_s / 3600:.1f} h"
    return (
        entry.name,
        entry.state,
        f"{entry.user or '?'}{f' ({entry.job})' * bool(entry.job)}",
        age if entry.began_s else "",
        f"{entry.arms_done}/{entry.arms}" if entry.kind == "sweep" else "run",
        best,
        f"{entry.device_s / 3600:.3g}",
        f"{entry.usd:.2f}" if entry.usd else "",
        f"{entry.size / 1e6:,.1f}",
    )


def stop(flags: SweepsFlags) -> None:
    """Says at once if nothing runs there."""
    from orchestrator.runs.state import directory_state
    from orchestrator.sweeps.housekeeping import stop

    assert flags.name
    directory = flags.places.below(flags.name)
    if directory_state(directory) == "running":
        print(f"{flags.name} is asked to save and stop ..", flush=True)
        print(f"{flags.name} is {stop(directory)}; the same command continues it")
    else:
        print(f"nothing runs in {directory}: {flags.name} is {stop(directory)}")


def rm(flags: SweepsFlags) -> None:
    from orchestrator.sweeps.housekeeping import ownerless, remove_everywhere, take

    root, store = flags.places.root(), flags.places.open_store()
    if flags.orphans:
        steps = ownerless(root, store)
        if not flags.dry_run:
            take(steps)
    else:
        assert flags.name
        steps = remove_everywhere(
            root, flags.name, store, dry_run=flags.dry_run, keep_frontier=flags.keep == "frontier"
        )
    if flags.dry_run:
        for step in steps:
            print(f"would remove {step.what}: {step.size / 1e6:,.1f} MB")
    would = "would be freed; nothing was removed" if flags.dry_run else "freed"
    print(f"{len(steps)} things, {sum(step.size for step in steps) / 1e6:,.1f} MB {would}")


if __name__ == "__main__":
    main()
