"""`cluster/slurm/frontier.sbatch` on a Slurm of two machines: it saves on a notice, and continues."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.machines import ROOT, Machine, machines
from tests.parts import system_program

STEPS = 80
FIELDS = ("train.report_every=5", "checkpoint.every=80", f"train.steps={STEPS}", "train.microbatch=8")
NEVER_S = 600
CONF = """
ClusterName=frontier
SlurmctldHost=m1(10.77.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge,cred_expire=10
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=3,bf_interval=3
MpiDefault=none
NodeName=m1 NodeAddr=10.77.0.1 CPUs=2
NodeName=m2 NodeAddr=10.77.0.2 CPUs=2
PartitionName=all Nodes=m1,m2 Default=YES
"""


@contextmanager
def slurm(folder: Path, boxes: tuple[Machine, ...]) -> Iterator[dict[str, str]]:
    """Starts the controller on the first machine, a daemon on each. Yields the environment of commands."""
    programs = [
        system_program("munged", "munge"),
        *(system_program(name, "slurm-wlm") for name in ("slurmctld", "slurmd")),
    ]
    munged, slurmctld, slurmd = programs
    folder.mkdir()
    (folder / "slurm.conf").write_text(CONF.format(folder=folder))
    # slurmd does not start without control groups, which it does not use here.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=no\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    files = {"socket": "munge", "key-file": "munge.key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    places = [f"--{name}={folder / file}" for name, file in files.items()]
    munge = subprocess.Popen(
        [munged, "--foreground", "--force", f"--log-file={folder / 'munge.log'}", *places]
    )
    try:
        env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        with (folder / "log.txt").open("w") as log:
            boxes[0].start(slurmctld, "-D", "-c", env=env, stdout=log, stderr=log)
            for number, box in enumerate(boxes, 1):
                box.start(slurmd, "-D", "-N", f"m{number}", env=env, stdout=log, stderr=log)
        yield env
    finally:
        munge.terminate()
        munge.wait()


def ask(box: Machine, env: dict[str, str], *command: str) -> str:
    return box.start(*command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).communicate()[0]


def until(what: str, condition: Callable[[], bool], log: Callable[[], str]) -> None:
    deadline = time.monotonic() + NEVER_S
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come: {log()[-3000:]}"
        time.sleep(0.3)


def rows(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


@pytest.mark.slow  # `test_cuts` saves two workers on a notice, `test_interrupted` a sweep
def test_a_notice_saves_and_the_requeued_job_repeats_no_step(digits, empty_store, tmp_path):
    """A requeued job waits for the end of its credential: `cred_expire`, by default two minutes."""
    out, file = tmp_path / "out.txt", tmp_path / "home" / "noticed" / "metrics.jsonl"
    train = [sys.executable, "jobs/train.py", "--name", "noticed", "--workers", "2", "--ep", "2"]
    train += ["--grace", "60", "--data", digits, "--tracking-uri", empty_store(tmp_path)]
    train += ["--set", "model.moe.router.kind=soft", "model.moe.num_experts=4", *FIELDS]
    with machines(2) as boxes, slurm(tmp_path / "slurm", tuple(boxes)) as env:
        head = boxes[0]
        daemons = tmp_path / "slurm" / "log.txt"
        until(
            "nodes", lambda: "2" in ask(head, env, "sinfo", "-h", "-t", "idle", "-o", "%D"), daemons.read_text
        )
        env |= {"NETWORK": "10.77.", "MOE_FRONTIER_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
        env.pop("RAY_ADDRESS", None)
        options = ["--parsable", "--cpus-per-task=2", "--time=30", f"--output={out}"]
        job = ask(head, env, "sbatch", *options, "cluster/slurm/frontier.sbatch", *train).strip()
        assert job.isdigit(), job

        def said() -> str:
            return (out.read_text() if out.exists() else "") + ask(head, env, "squeue")

        until("step 20", lambda: max((r.get("step", 0) for r in rows(file)), default=0) >= 20, said)
        ask(head, env, "scancel", "--signal=USR1", "--batch", job)
        until("requeue", lambda: ask(head, env, "squeue", "-h", "-o", "%T") == "PENDING\n", said)
        assert "Interrupted: noticed is saved at step " in out.read_text(), out.read_text()
        saved = int(out.read_text().partition("is saved at step ")[2].partition(".")[0])
        assert 20 <= saved < STEPS
        until("end", lambda: "COMPLETED" in ask(head, env, "scontrol", "show", "job", job), said)
    assert [row["resumed"] for row in rows(file) if "resumed" in row] == [saved]
    assert [row["step"] for row in rows(file) if "metrics" in row] == [*range(5, STEPS + 1, 5)]
