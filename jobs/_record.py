"""Records what commands find out about trained models in the directories of their runs; trackers follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jobs._cli import Places, source_labels

if TYPE_CHECKING:
    from orchestrator.checkpoint.models import ModelRef


class Record:
    """The findings of a command, recorded model by model."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._written: dict[str, None] = {}  # directories
        self._homeless: list[str] = []

    def names(self, model: ModelRef, *paths: str) -> dict[str, dict[str, str]]:
        """Names data sets in figures of the model: name -> ``path`` and ``digest``, in the order of `paths`;
        empty for a model without a run, whose figures are not recorded.
        """
        from orchestrator.data.manifest import open_manifest
        from orchestrator.runs.measurements import data_names

        if model.directory is None:
            self._homeless.append(model.name)
            return {}
        return data_names(model.directory, {path: open_manifest(path).digest() for path in paths})

    def write(
        self,
        directory: str,
        metrics: Mapping[str, float],
        *,
        tables: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
        files: Mapping[str, bytes] | None = None,
        data: Mapping[str, Mapping[str, str]] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Writes a measurement of the run or the sweep in a directory."""
        from orchestrator.runs.measurements import write_measurement

        write_measurement(
            directory, metrics, tables=tables, files=files, data=data, labels=labels, by=source_labels()
        )
        self._written[directory] = None

    def send(self) -> None:
        """Prints where the figures are, and brings MLflow up to date. If it does not answer, it gets them
        later.
        """
        from orchestrator.errors import UsageError
        from orchestrator.runs.measurements import FOLDER
        from orchestrator.runs.sweep_directory import owner_of
        from orchestrator.tracking.sync import send

        if self._homeless:
            print(f"not recorded, because the run is not there: {', '.join(dict.fromkeys(self._homeless))}")
        if not self._written:
            return
        first, *others = self._written
        print(f"recorded {first}/{FOLDER}{f' and in {len(others)} more runs' if others else ''}")
        owned: dict[str, list[str]] = {}
        for directory in self._written:
            owned.setdefault(owner_of(directory), []).append(directory)
        try:
            store = self._places.open_store()
        except UsageError as error:
            print(f"not in MLflow yet: {error}")
            return
        for owner, directories in owned.items():
            if missing := send(owner, store, only=directories):
                print(missing)
