"""What devices cost and can do, from a table that the user edits; and the bound of what is spent."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields

import yaml

from orchestrator import storage
from orchestrator.codec import from_dict
from orchestrator.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Device:
    """What one worker computes on.

    Attributes:
    peak_tflops: dense matmuls in the fastest format that training uses, 1e12 FLOPs per second: what an mfu
        is a part of.
    memory_gib: None: not checked.
    """

    usd_per_hour: float
    peak_tflops: float
    memory_gib: float | None = None

    def __post_init__(self) -> None:
        if self.usd_per_hour < 0:
            raise ValueError(f"usd_per_hour must be at least 0, got {self.usd_per_hour}")
        for name in ("peak_tflops", "memory_gib"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Of device-hours, or of money at `usd_per_hour` of a device; None: no bound. With both, whichever is
    reached first.
    """

    hours: float | None = None
    usd: float | None = None
    usd_per_hour: float = 0.0

    def __post_init__(self) -> None:
        for name in ("hours", "usd"):
            if (value := getattr(self, name)) is not None and not value > 0:  # nan is neither
                raise UsageError(f"a budget of {name}={value:g} allows nothing: give more, or none")
        if self.usd is not None and self.usd_per_hour <= 0:
            raise UsageError(
                f"a budget of {self.usd:g} usd needs the price of a device, which is {self.usd_per_hour:g}"
                " per hour: name a device of cluster/prices.yaml, or bound the hours"
            )

    def limit_s(self) -> float:
        """Device-seconds in all; infinite without bounds."""
        hours = math.inf if self.hours is None else self.hours
        return 3600 * (hours if self.usd is None else min(hours, self.usd / self.usd_per_hour))

    def allows(self, next_predicted_s: float, *, spent_s: float, running_predicted_s: float) -> bool:
        """Whether one more trial fits, beside what is spent and what running trials still will spend; all in
        device-seconds.
        """
        return spent_s + running_predicted_s + next_predicted_s <= self.limit_s()


def load_prices(path: str) -> dict[str, Device]:
    """kind of device -> Device.

    Raises:
        UsageError: if there is no such file, or it is no table of devices; it says what is wrong.
    """
    try:
        table = yaml.safe_load(storage.read_bytes(path))
    except FileNotFoundError:
        raise UsageError(f"no price table at {path}: copy cluster/prices.yaml and edit it") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no YAML: {error}") from None
    if not isinstance(table, Mapping) or not table:
        raise UsageError(f"{path} holds no devices: write `H100-80: {{usd_per_hour: .., peak_tflops: ..}}`")
    return {str(kind): _device(f"{path}: {kind}", entry) for kind, entry in table.items()}


def _device(where: str, entry: object) -> Device:
    if not isinstance(entry, Mapping):
        raise UsageError(f"{where} is a group of fields, not a value; got {entry!r}")
    wanted = [field.name for field in fields(Device) if field.default is MISSING]
    if missing := [name for name in wanted if name not in entry]:
        raise UsageError(f"{where} has no {missing[0]}")
    try:
        return from_dict(Device, {str(name): value for name, value in entry.items()})
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
