"""How a command finds or starts Ray, and what Ray prints on its terminal and keeps of its environment."""

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray._private import utils, worker
from ray.tune.execution.class_cache import _ActorClassCache

from orchestrator.sweeps import engine
from orchestrator.training import cluster

CONNECT = "from orchestrator.training import cluster; cluster.connect()"
LONG = "/tmp/" + "scratch_of_a_job_" * 6


def test_a_dead_process_is_one_sentence(monkeypatch):
    """Ray's message has 20 lines of a dump, or advice that fits every death."""
    printed: list[str] = []

    def whole(data: dict[str, Any], ignore_prefix: bool) -> None:
        printed.extend(data["lines"])

    monkeypatch.setattr(worker, "print_to_stdstream", whole)
    for _ in range(2):
        cluster._shorten_messages()
    dump = "Raylet is terminated. Termination is unexpected. Possible reasons include: ..:\n  [state-dump]"
    death = "A worker died. Worker exit detail: End of file. Some common causes include: (1) the process .."
    worker.print_to_stdstream({"lines": [dump, death]}, ignore_prefix=False)
    assert printed == [
        "Raylet is terminated. Termination is unexpected",
        "A worker died. Worker exit detail: End of file",
    ]


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (
            {"RAY_ADDRESS": "ray://127.0.0.1:10001"},
            "RAY_ADDRESS=ray://127.0.0.1:10001 is no address to train at",
        ),
        ({"RAY_ADDRESS": "local", "HOME": "/proc/none"}, "Ray cannot start here ("),
        ({"RAY_ADDRESS": "local", "RAY_TMPDIR": "/proc/none"}, "RAY_TMPDIR may name"),
        ({"RAY_ADDRESS": "local", "TMPDIR": LONG}, "AF_UNIX path length cannot exceed"),
    ],
)
def test_where_ray_cannot_start_or_train(env: dict[str, str], said: str, tmp_path: Path) -> None:
    """It is not said that no cluster answers."""
    own = {"RAY_AUTH_TOKEN_PATH": "", "HOME": str(tmp_path), **env}
    done = subprocess.run(
        [sys.executable, "-c", CONNECT],
        env={name: value for name, value in (os.environ | own).items() if value},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("orchestrator.errors.UsageError: ")
    assert said in line
    assert "no Ray cluster answers" not in line


LISTENS = """
import psutil, ray
from orchestrator.training import cluster
cluster.connect()
ray.get(ray.remote(lambda: 1).remote())
process = psutil.Process()
for each in (process, *process.children(recursive=True)):
    for socket in each.net_connections("inet"):
        if socket.status == psutil.CONN_LISTEN:
            print(socket.laddr.ip, each.name())
"""


@pytest.mark.smoke
def test_a_ray_that_a_command_starts_listens_on_loopback_alone(tmp_path: Path) -> None:
    """Also the server of its dashboard, and a worker."""
    env = {"RAY_ADDRESS": "local", "HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", LISTENS], env=os.environ | env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    listening = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert {"raylet", "gcs_server"} <= {name for _, name in listening}, done.stdout
    assert len(listening) > 6
    assert {address.removeprefix("::ffff:") for address, _ in listening} == {"127.0.0.1"}


@pytest.mark.parametrize("mode", [None, 0o644, 0o600])
def test_rays_token_is_its_owners_alone(
    mode: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, said = tmp_path / "ray/auth_token", list[str]()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    if mode is not None:
        path.parent.mkdir()
        path.write_text("of old")
        path.chmod(mode)
    cluster._make_token(said.append)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text()) == (64 if mode is None else 6)
    assert [str(path) in line for line in said] == ([] if mode == 0o600 else [True])


def test_ray_is_told_no_password_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its dashboard shows the command line of each driver."""
    line = "python jobs/train.py --tracking-uri http://team:secret@host:5000"
    monkeypatch.setattr(utils, "get_entrypoint_name", lambda: line)
    with cluster._without_passwords():
        assert utils.get_entrypoint_name() == line.replace("secret", "***")
    assert utils.get_entrypoint_name() == line


def test_a_trial_has_no_key_in_its_runtime_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_SECURITY_TOKEN"):
        monkeypatch.setenv(name, "planted")
    assert engine.train_trial

    class Trainable:
        pass

    options = _ActorClassCache().get(Trainable)._default_options
    assert "planted" not in str(options["runtime_env"])
