"""What a user has spent in a calendar month (UTC), over all runs and sweeps of a storage.

A sweep writes its device-seconds by month and owner to its ``spent.json``; those of a run are in its reports.
"""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from orchestrator import storage
from orchestrator.errors import UsageError
from orchestrator.names import RESERVED
from orchestrator.runs.measurements import USER
from orchestrator.runs.metrics_file import METRICS, LineReader
from orchestrator.runs.run_directory import CONFIG, SWEEP, RunDir, read_json
from orchestrator.runs.sweep_directory import SweepDir

log = logging.getLogger(__name__)

READ_EVERY_S = 30.0
READERS = 16  # directories that are read at the same time

Months = dict[str, dict[str, float]]  # month, as 2026-07 -> owner -> device-seconds


def month_of(time_s: float) -> str:
    """Returns the month of a time in seconds since the epoch, as 2026-07."""
    return time.strftime("%Y-%m", time.gmtime(time_s))


def months_of(sweep: SweepDir, spent: Mapping[str, Any]) -> Months:
    """Returns what a sweep has spent by month. Without months in its ``spent.json``, which an earlier version
    wrote, all of it belongs to the month in which the sweep began.
    """
    if "months" in spent or not spent:
        return spent.get("months", {})
    total_s = spent.get("device_s", 0.0) + sum(left["device_s"] for left in spent.get("running", ()))
    record = read_json(sweep.file(SWEEP))
    return {month_of(record["began_s"]): {record.get("labels", {}).get(USER, ""): total_s}}


class OthersSpending:
    """Reads what the owner of a sweep spends in other runs and sweeps of its storage, each half minute at
    most. A copy of a directory counts once, and a copy of this sweep never.
    """

    def __init__(self, directory: str, owner: str) -> None:
        self.root = directory.rpartition("/")[0]
        self._directory = directory
        self._owner = owner
        self._runs: dict[str, _RunSpending] = {}
        self._damaged = set[str]()
        self._read_s, self._month, self._sum_s = -math.inf, "", 0.0

    def device_s(self, month: str) -> float:
        """Returns the device-seconds of a month. What cannot be read is left out, with a warning."""
        if month != self._month or time.monotonic() - self._read_s >= READ_EVERY_S:
            found = defaultdict[str, float](float)
            names = [name for name in storage.names(self.root) if name not in RESERVED]
            with ThreadPoolExecutor(READERS) as readers:
                for key, device_s in readers.map(partial(self._read, month), names):
                    found[key] = max(found[key], device_s)
            found.pop(read_json(storage.join(self._directory, SWEEP))["key"], None)
            self._read_s, self._month, self._sum_s = time.monotonic(), month, sum(found.values())
        return self._sum_s

    def _read(self, month: str, name: str) -> tuple[str, float]:
        """Returns the key of a run or a sweep, and what the owner has spent on it."""
        sweep = SweepDir(storage.join(self.root, name))
        try:
            if (spent := read_json(sweep.spent)) is not None:
                device_s = months_of(sweep, spent).get(month, {}).get(self._owner, 0.0)
                return (read_json(sweep.file(SWEEP))["key"] if device_s else ""), device_s
            run = read_json(sweep.file(CONFIG))
            if run is not None and run.get("labels", {}).get(USER) == self._owner:
                return run["key"], self._of_run(sweep.path, month)
        except FileNotFoundError:
            pass  # removed meanwhile
        except (UsageError, AttributeError, TypeError, KeyError) as error:
            if name not in self._damaged:
                self._damaged.add(name)
                log.warning("%s cannot be read, and counts for no budget: %s", sweep.path, error)
        return "", 0.0

    def _of_run(self, directory: str, month: str) -> float:
        result = RunDir(directory).result()
        if result and month_of(result.time_s) < month:
            return 0.0  # without a look at its reports
        return self._runs.setdefault(directory, _RunSpending(directory)).device_s(month)


class _RunSpending:
    """Adds up the device-seconds between the reports of a run, by month; reads each report once."""

    def __init__(self, directory: str) -> None:
        self._lines = LineReader(directory, METRICS)
        self._last_s = 0.0
        self._months = defaultdict[str, float](float)

    def device_s(self, month: str) -> float:
        for row in self._lines.new():
            costs = row.get("metrics", {})
            if "cost/device_s" in costs:
                now_s = costs.get("cost/marginal_device_s", costs["cost/device_s"])  # without its trunk
                # It falls when a run goes on from a checkpoint before its last report.
                self._months[month_of(row["time_s"])] += max(0.0, now_s - self._last_s)
                self._last_s = now_s
        return self._months[month]
