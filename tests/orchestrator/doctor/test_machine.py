"""What machines say of themselves, judged. GPUs, small /dev/shm and the like are said, not had."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from orchestrator.doctor import facts, machine
from orchestrator.doctor.facts import Machine, examine, network_disk

GIB = 2**30


@pytest.fixture(scope="module")
def here() -> Machine:
    return examine()


def test_this_machine_is_as_the_project_says(here: Machine) -> None:
    found = machine.check_versions(here, {"a": here}, Path(__file__).parents[3])
    assert found.status == "ok", found
    assert here.memory == psutil.virtual_memory().total


def test_versions_that_differ_between_nodes(here: Machine, tmp_path: Path) -> None:
    other = replace(here, versions=here.versions | {"ray": "2.59.0"})
    found = machine.check_versions(here, {"a": here, "b": other}, tmp_path)
    assert found.status == "fail"
    assert found.found.startswith("1 of 2 nodes: b: ray 2.59.0, here 2.")


def test_versions_outside_the_bounds_and_other_than_tested(here: Machine, tmp_path: Path) -> None:
    told = '[project]\nrequires-python = ">=3.11"\ndependencies = ["torch>=99", "ray[data]"]\n'
    (tmp_path / "pyproject.toml").write_text(told)
    found = machine.check_versions(here, {}, tmp_path)
    assert found.status == "fail"
    assert f"torch {here.versions['torch']} is not >=99" in found.found
    (tmp_path / "pyproject.toml").write_text(told.replace("99", "1"))
    (tmp_path / "constraints.txt").write_text("numpy==1.0\n")
    found = machine.check_versions(here, {}, tmp_path)
    assert (found.status, found.found) == ("warn", f"numpy {here.versions['numpy']}, tested with 1.0")


def test_a_missing_package(here: Machine, tmp_path: Path) -> None:
    without = replace(here, versions=here.versions | {"optuna": None})
    assert "optuna is not installed" in machine.check_versions(without, {}, tmp_path).found


def test_shared_memory_smaller_than_the_object_store(here: Machine) -> None:
    nodes = {"a": replace(here, shm=GIB), "b": replace(here, shm=4 * GIB)}
    found = machine.check_shared_memory(nodes, {"a": 2 * GIB, "b": 2 * GIB})
    assert found.status == "warn"
    assert "a: /dev/shm has 1.00 GiB, the object store 2.00 GiB" in found.found
    assert "--shm-size=2.2g" in found.way_out  # a tenth more than the store
    assert machine.check_shared_memory(nodes, {"a": GIB, "b": GIB}).status == "ok"


@pytest.mark.parametrize(("limit", "status"), [(256, "fail"), (4096, "warn"), (65536, "ok"), (-1, "ok")])
def test_open_files(here: Machine, limit: int, status: str) -> None:
    enough = replace(here, open_files=(1024, 65536))  # Ray lifts a driver's own
    found = machine.check_open_files(enough, {"a": replace(here, open_files=(limit, limit))})
    assert found.status == status


def test_memory_and_disk(here: Machine) -> None:
    full = {"a": replace(here, memory=100 * GIB, memory_free=9 * GIB, disk_free_frac=0.04)}
    assert machine.check_memory(full).status == "warn"
    assert machine.check_disk(full).found == "1 of 1 nodes: a: 4% free"
    fine = {"a": replace(here, memory=100 * GIB, memory_free=50 * GIB, disk_free_frac=0.5)}
    assert machine.check_memory(fine).status == machine.check_disk(fine).status == "ok"


def test_more_threads_than_cpus(here: Machine) -> None:
    found = machine.check_threads({"a": replace(here, cpus=4, threads="8")})
    assert (found.status, found.found) == ("warn", "1 of 1 nodes: a: OMP_NUM_THREADS=8 with 4 CPUs")
    assert machine.check_threads({"a": replace(here, threads=None)}).status == "ok"


def test_gpus_of_driver_torch_and_ray_must_agree(here: Machine) -> None:
    eight = replace(here, gpus=8, torch_gpus=8, cuda=("13.0", "13.0"))
    broken = replace(eight, torch_gpus=0, cuda=("12.2", "13.0"))
    found = machine.check_gpus({"a": eight, "b": broken}, {"a": 8, "b": 8}, wanted=True)
    assert found.status == "fail"
    assert "b: driver 8 GPUs (CUDA 12.2), torch 0 (CUDA 13.0)" in found.found
    assert machine.check_gpus({"a": eight}, {"a": 4}, wanted=True).status == "warn"
    assert machine.check_gpus({"a": eight}, {"a": 8}, wanted=False).status == "warn"
    assert machine.check_gpus({"a": eight}, {"a": 8}, wanted=True).status == "ok"
    assert machine.check_gpus({"a": here}, {"a": here.gpus}, wanted=here.gpus > 0).status == "ok"


def test_a_network_disk_is_told_by_its_longest_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/ is ext4, /mnt nfs4, /mnt/fast xfs again."""
    from collections import namedtuple

    part = namedtuple("part", "mountpoint fstype")
    disks = [part("/", "ext4"), part("/mnt", "nfs4"), part("/mnt/fast", "xfs")]
    monkeypatch.setattr(facts.psutil, "disk_partitions", lambda all: disks)
    assert [network_disk(p) for p in ("/home/me", "/mnt/runs", "/mnt/fast/runs")] == [None, "nfs4", None]
