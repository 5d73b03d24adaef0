"""The named sweeps. To add one: write its file, add its line."""

from collections.abc import Callable

from orchestrator.sweeping.catalog.quickstart import quickstart
from orchestrator.sweeping.sweep import Sweep

SWEEPS: dict[str, Callable[[], Sweep]] = {"quickstart": quickstart}
