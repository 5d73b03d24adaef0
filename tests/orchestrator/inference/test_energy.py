"""Energy is read from a folder as Linux shows it."""

from pathlib import Path

import pytest

from orchestrator.errors import UsageError
from orchestrator.inference.energy import energy_meter


def shown(folder: Path, zone: str, name: str, *, uj: int, wraps_at: int = 10_000_000) -> Path:
    """Makes a zone of a folder as /sys/class/powercap."""
    (folder / zone).mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", uj), ("max_energy_range_uj", wraps_at)):
        (folder / zone / file).write_text(f"{value}\n")
    return folder / zone / "energy_uj"


def test_packages_are_summed_and_counters_wrap(tmp_path: Path) -> None:
    """Cores are parts of a package. 3 J, then 1 J and 2 J of a counter that begins again after 10 J."""
    first = shown(tmp_path, "intel-rapl:0", "package-0", uj=1_000_000)
    second = shown(tmp_path, "intel-rapl:1", "package-1", uj=9_000_000)
    core = shown(tmp_path, "intel-rapl:0:0", "core", uj=0)
    shown(tmp_path, "intel-rapl:2", "psys", uj=0)
    shown(tmp_path, "intel-rapl-mmio:0", "package-0", uj=0)
    used = energy_meter(str(tmp_path))
    first.write_text("4000000\n")
    core.write_text("2000000\n")
    assert used() == 3.0
    assert used() == 0.0
    first.write_text("5000000\n")
    second.write_text("1000000\n")
    assert used() == 3.0


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read: there is no .*intel-rapl.*Virtual machines"):
        energy_meter(str(tmp_path / "none"))
    shown(tmp_path, "intel-rapl:0", "package-0", uj=0).unlink()
    (tmp_path / "intel-rapl:0/energy_uj").mkdir()  # as unreadable as another user's, also to root
    with pytest.raises(UsageError, match=r"cannot be read: .*energy_uj'\. Linux shows it to root alone"):
        energy_meter(str(tmp_path))
