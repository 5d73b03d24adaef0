"""The plugin of docs/own_parts.md: `.wandb` files have every number of a run once, also after kills."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest
from wandb.proto.wandb_internal_pb2 import Record

from orchestrator.runs.run_directory import RunDir
from orchestrator.tracking.projection import project_run
from tests.made_directories import begin, end, run_at
from tests.orchestrator.tracking.stores import wait_until

pytestmark = pytest.mark.smoke
ROOT = Path(__file__).parents[3]
PLUGIN = ROOT / "tests" / "own" / "wandb_tracker.py"
BLOCK = 32768  # of LevelDB's log, in which W&B writes
KILLED = """
import os, signal, sys, time
from pathlib import Path
from orchestrator import TrackerConfig, load_plugins
from orchestrator.runs.metrics_file import MetricsWriter
from tests.made_directories import run_at

load_plugins([sys.argv[1]])
run = run_at(Path(sys.argv[2]), "killed")
for part, wait_s in enumerate((0.9, 0.02, 0.1, 0.3)):
    writer = MetricsWriter(run)
    writer.resumed(max(0, 50 * part - 7))
    for step in range(max(0, 50 * part - 7) + 1, 50 * part + 51):
        writer.report(step, {"train/loss": 1 / (3 * step), "val/acc1": step * 1e-30})
    writer.close()
    done, told = os.pipe()
    if not (pid := os.fork()):
        while True:
            assert TrackerConfig.kinds["wandb"]().follow(f"{sys.argv[2]}/killed").update() == []
            os.write(told, b".")
    os.close(told)
    print(pid, flush=True)
    os.read(done, part and 1)  # the first is killed while it starts
    time.sleep(wait_s)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print("killed", flush=True)
sys.stdin.readline()  # until the run has ended
print(TrackerConfig.kinds["wandb"]().follow(f"{sys.argv[2]}/killed").update())
"""


def written(directory: str) -> dict[str, list[tuple[int, float]]]:
    """Returns name -> (step, value) of all offline runs in a directory."""
    found = defaultdict(list)
    for file in Path(directory).glob("wandb/offline-run-*/run-*.wandb"):
        for record in records(file.read_bytes()):
            values = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            at = int(values.pop("_step", -1))
            for name in values.keys() - {"_timestamp", "_runtime"}:
                found[name].append((at, json.loads(values[name])))
    return dict(found)


def records(content: bytes) -> list[Record]:
    """Reads LevelDB's log: a header, then blocks of records, which have a checksum, a length and a kind."""
    found, at, parts = [], 7, b""
    while at < len(content):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(Record.FromString(parts))
            parts = b""
    return found


def reported(directory: str) -> dict[str, list[tuple[int, float]]]:
    """Returns what trackers are told of a run."""
    found, record = defaultdict(list), RunDir(directory).record()
    assert record
    for scalar in project_run(directory, record, labels={}, live=False).scalars():
        found[scalar.name].append((scalar.at, scalar.value))
    return dict(found)


@pytest.mark.slow  # of a tracker that is no part of the product
def test_kills_at_any_moment(tmp_path: Path) -> None:
    """Of four processes that write without a pause. The run has a whole file or none, and no server stays."""
    run = run_at(tmp_path, "killed")
    directory = begin(run)
    command = [sys.executable, "-c", KILLED, str(PLUGIN), str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=PIPE, stdout=PIPE, text=True) as program:
        assert program.stdin
        assert program.stdout
        *killed, last = (program.stdout.readline().strip() for _ in range(5))
        assert last == "killed"
        found = written(directory)["train/loss"]
        assert found == reported(directory)["train/loss"][: len(found)]
        end(run, 201, train__loss=0.1, val__acc1=0.5)
        assert program.communicate("ended\n")[0] == "[]\n"
    steps = range(1, 201)
    assert written(directory) == {
        "train/loss": [*((8 * step, 1 / (3 * step)) for step in steps), (8 * 201, 0.1)],
        "val/acc1": [*((8 * step, step * 1e-30) for step in steps), (8 * 201, 0.5)],
    }
    assert len([*Path(directory, "wandb").iterdir()]) == 1

    def ended() -> bool:
        lines = [" ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])]
        return not any(line.endswith(f"--pid {pid}") for line in lines for pid in killed)

    wait_until(ended, 30)
