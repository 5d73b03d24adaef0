"""The energy of this machine's processors, by the counters that Linux shows of them: RAPL of Intel and AMD.

A counter is that of a whole package: of all its cores, with those that idle or do other work, and without
memory and GPUs. Source: https://docs.kernel.org/power/powercap/powercap.html
"""

from collections.abc import Callable
from pathlib import Path

from orchestrator.errors import UsageError

POWERCAP = "/sys/class/powercap"


def energy_meter(folder: str) -> Callable[[], float]:
    """Returns what reads the joules that all packages have used since it was read last.

    Raises:
        UsageError: if there is no counter, or this user may not read it; it says how it could be read.
    """
    counters = f"{folder}/intel-rapl:*/energy_uj"
    try:
        zones = [zone for zone in Path(folder).glob("intel-rapl:*") if _text(zone, "name")[:7] == "package"]
        wraps_at = [int(_text(zone, "max_energy_range_uj")) for zone in zones]

        def read() -> list[int]:
            return [int(_text(zone, "energy_uj")) for zone in zones]

        last = read()
    except OSError as error:
        raise UsageError(
            f"the energy of processors cannot be read: {error}. Linux shows it to root alone: run this as"
            f" root, or once `sudo chmod a+r {counters}`"
        ) from None
    if not zones:
        raise UsageError(
            f"the energy of processors cannot be read: there is no {counters}. Virtual machines and most"
            " containers have none: measure on a machine itself"
        )

    def used() -> float:
        nonlocal last
        before, last = last, read()
        parts = zip(before, last, wraps_at, strict=True)
        return sum((now - was) % most for was, now, most in parts) / 1e6

    return used


def _text(zone: Path, name: str) -> str:
    return (zone / name).read_text()
