"""The directory of a sweep; its runs lie below it.

SWEEP/sweep.json          objectives, seeds, reference point, trials
SWEEP/summary.json        its frontier: note, metrics, tags, members, aliases, tables
SWEEP/spent.json          what its budget has paid
SWEEP/measurements/       what its models reach at other settings of their routers
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from orchestrator.records import Move
from orchestrator.runs.run_directory import SWEEP, Directory, RunDir, read_json, write_json
from orchestrator.upgrade import upgraded_arm

SUMMARY = "summary.json"


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """The content of `sweep.json`, with the name and the places of today.

    Attributes:
        key: names this start of the sweep; a sweep that starts over gets another key.
        base: the run that every arm changes, as `codec.to_dict` writes it.
        val_images: images of the val split of the base's data; 0 in records that do not know it.
        quality, cost: the metrics to maximise and to minimise, with their units in their names.
        seeds: every arm is trained with each; if empty, once, with the base's seed.
        arms: name -> dotted changes of the base.
        drawn: names of the arms that a search has drawn.
        reference: metric -> the worst value that hypervolumes count; measured costs are added once known.
        baselines: what is no arm of the sweep -> its quality, such as a linear classifier on pixels.
        passed: arms that early stopping passed by -> what each was expected to add, as a part of the
            hypervolume, and the cost that it still needed, as a part of the cost of all arms.
        trials: name -> ``directory``, relative to the sweep's, and labels: role, arm, seed and so on.
        labels: further tags in MLflow.
        contents: digests of what its runs read or start from, by the field of base or arm that says where.
        answers: what a search answered the space for each arm that it drew: arm -> question -> answer.
        plugins: those that its trials were made with.
        status: ``running`` until its trials have ended, or its command. ``interrupted`` if trials are left.
    """

    key: str
    name: str
    began_s: float
    base: dict[str, Any]
    data_digest: str
    quality: str
    cost: str
    val_images: int = 0
    seeds: list[int] = field(default_factory=list)
    trunk: dict[str, Any] | None = None
    claims: list[str] = field(default_factory=list)
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    drawn: list[str] = field(default_factory=list)
    reference: dict[str, float] = field(default_factory=dict)
    baselines: dict[str, float] = field(default_factory=dict)
    passed: dict[str, tuple[float, float]] = field(default_factory=dict)
    trials: dict[str, dict[str, str]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    contents: dict[str, str] = field(default_factory=dict)
    answers: dict[str, dict[str, Any]] = field(default_factory=dict)
    plugins: list[str] = field(default_factory=list)
    status: Literal["running", "finished", "failed", "interrupted"] = "running"

    @property
    def is_over(self) -> bool:
        """Whether the sweep has come to its end, at which paused trials are stopped."""
        return self.status in ("finished", "failed")

    def drawn_arms(self) -> dict[str, dict[str, Any]]:
        """Returns the arms that a search has drawn: name -> dotted changes of the base."""
        return {name: self.arms[name] for name in self.drawn}


class SweepDir(Directory):
    """The directory of a sweep."""

    def record(self) -> SweepRecord | None:
        if (content := read_json(self.file(SWEEP))) is None:
            return None
        record = SweepRecord(**content)
        move, arms = Move(record.base, self.path), record.arms
        return replace(
            record,
            name=move.name or record.name,
            base=move.config(record.base),
            arms=move.tree({arm: upgraded_arm(arms[arm], record.base) for arm in arms}),
            trials=move.tree(record.trials),
        )

    def write(self, record: SweepRecord) -> None:
        write_json(self.file(SWEEP), asdict(record))

    def update(self, changes: Callable[[SweepRecord], Mapping[str, Any]]) -> None:
        """Writes changed fields of the record."""
        if (record := self.record()) is not None:
            self.write(replace(record, **changes(record)))

    def trial(self, labels: Mapping[str, str]) -> RunDir:
        """Returns the directory of a trial with these labels."""
        return RunDir(self.file(labels["directory"]))

    def answers(self) -> dict[str, dict[str, Any]]:
        """Returns what a search answered the space, by the names of its runs."""
        if (record := self.record()) is None:
            return {}
        arms = {f"{record.name}/{of['directory']}": of["arm"] for of in record.trials.values()}
        return {run: record.answers[arm] for run, arm in arms.items() if arm in record.answers}

    def summary(self) -> dict[str, Any]:
        """Returns the summary of its frontier; empty before there is any."""
        return read_json(self.file(SUMMARY)) or {}

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        write_json(self.file(SUMMARY), summary)

    @property
    def spent(self) -> str:
        return self.file("spent.json")


def owner_of(directory: str) -> str:
    """Returns the directory that trackers follow: that of the sweep for a trial, else `directory` itself."""
    above = directory
    for _ in range(2):
        above = above.rpartition("/")[0]
        if (sweep := SweepDir(above).record()) is not None:
            within = directory[len(above) + 1 :]
            return above if any(t["directory"] == within for t in sweep.trials.values()) else directory
    return directory
