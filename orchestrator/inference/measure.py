"""Measures what the finished arms of a sweep take to use, alone and in turns, and keeps it with the sweep.

One trained model of each arm is written to the file that a user is handed. A process that does nothing else
times all of them in turns: its times compare, and a front may be drawn through them.
"""

import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from moe.overrides import AS_TRAINED, RoutingOverrides
from orchestrator.checkpoint.export import export, write_export
from orchestrator.checkpoint.files import SUFFIX
from orchestrator.checkpoint.models import ModelRef, read_model
from orchestrator.config import RunConfig
from orchestrator.costs import FORWARD, computed
from orchestrator.errors import UsageError
from orchestrator.inference import energy
from orchestrator.inference.clock import ClockJob, Runtime
from orchestrator.inference.timing import (
    FEWEST_CALLS,
    FEWEST_ROUNDS,
    FOREIGN,
    WARM_UP,
    Round,
    energies,
    is_disturbed,
    quiet_rounds,
    times,
)
from orchestrator.plugins import shipped
from orchestrator.runs.measurements import HOST, made_by, measurements, rows_of, write_measurement
from orchestrator.runs.sweep_directory import SweepDir

SOURCES = str(Path(__file__).parents[2])
GFLOPS_PER_S = 20.0  # about what a thread computes, to plan by
ENERGIES = ("mj", "mj_q25", "mj_q75")  # columns of rows, where the system says it
SAY_EVERY_S = 10.0
TABLE, ROUNDS_TABLE = "inference.json", "inference_rounds.json"

MeasuredRow = Mapping[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How models are called: the runtime, so many images at a time, and so many threads."""

    runtime: Runtime = "onnx"
    batch: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "threads"):
            if getattr(self, name) < 1:
                raise UsageError(f"`{name}` must be at least 1, got {getattr(self, name)}")

    def __str__(self) -> str:
        images = "one image" if self.batch == 1 else f"{self.batch} images"
        runtime = {"onnx": "onnxruntime", "torch": "torch"}[self.runtime]
        return f"{images}, {runtime}, {self.threads} thread{'s' * (self.threads > 1)}"


ONE_IMAGE, A_BATCH = Setting(), Setting(batch=32)
DEFAULTS = (ONE_IMAGE, A_BATCH, Setting(runtime="torch"))


def machine() -> str:
    """Returns the processor of this machine and how many of them it has."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
            name = names[0] if names else name
    except OSError:
        pass
    return f"{os.cpu_count()} x {name}"


def measured_rows(directory: str, setting: Setting, *, on: str | None = None) -> list[MeasuredRow]:
    """Returns the rows of the last measurement of a sweep at a setting, on the machine `on` if that is given:
    one for each arm. Empty if there is none.
    """
    for each in reversed(measurements(directory)):
        rows: list[MeasuredRow] = [
            row for row in rows_of(each.tables.get(TABLE, {"columns": [], "data": []})) if _is(row, setting)
        ]
        if rows and on in (None, rows[0]["machine"]):
            return rows
    return []


def measure_sweep(
    directory: str,
    settings: Sequence[Setting] = DEFAULTS,
    *,
    points: Mapping[str, RoutingOverrides] = {},
    say: Say = lambda line: None,
    at_most_s: float = 60.0,
) -> list[MeasuredRow]:
    """Measures the finished arms of the sweep in a directory, and writes it to its record. Returns the rows.

    An arm whose model cannot be written for a runtime has a row without times, and is named.

    Args:
        points: operating points of arms to measure with them.

    Raises:
        UsageError: if no arm has finished, models read no images, or a package is missing.
    """
    cpus = os.cpu_count() or 1
    if (most := max(setting.threads for setting in settings)) > cpus:
        raise UsageError(f"`threads` {most}: this machine has {cpus} processors")
    models = typical_models(directory)
    if not models:
        raise UsageError(f"{directory} has no finished arm whose model reads images: nothing to measure")
    arms = {name: name.partition(": ")[0] for name in points}
    points = {name: point for name, point in points.items() if arms[name] in models}
    models |= {name: models[arms[name]].at_point(point) for name, point in points.items()}
    rows, rounds = list[MeasuredRow](), list[dict[str, Any]]()
    with TemporaryDirectory(prefix="moe-frontier-") as folder:
        runtimes: dict[Runtime, None] = dict.fromkeys(setting.runtime for setting in settings)
        for runtime in runtimes:
            files, why = write_models(models, runtime, folder, say, points)
            for setting in (s for s in settings if s.runtime == runtime):
                rows += [_unwritten(arm, models[arm].name, setting, reason) for arm, reason in why.items()]
                if not files:
                    continue
                say(f"timing {len(files)} models in turns: {setting}")
                found, memory = run_clock({a: models[a] for a in files}, files, setting, at_most_s)
                rows += _rows(models, files, setting, found, memory)
                rounds += _round_rows(setting, found)
                if text := disturbance(found):
                    say(text)
    tables = {TABLE: _columns(rows), **({ROUNDS_TABLE: _columns(rounds)} if rounds else {})}
    write_measurement(directory, {}, tables=tables, by={"machine": machine()})
    return rows


def estimated_s(arms: Iterable[RunConfig]) -> float:
    """Returns about how long the default measurement of these arms takes; infinite if their weights would
    take more than half of this machine's memory, or they read no images.
    """
    known = [computed(run, run.train.steps) for run in arms if run.model.image_side()]
    weights = 2 * 4 * sum(costs["cost/params"] for costs in known)  # in the runtime, and in the file
    if not known or weights > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2:
        return math.inf
    images = FEWEST_ROUNDS * (WARM_UP + FEWEST_CALLS) * sum(setting.batch for setting in DEFAULTS)
    calls_s = images * sum(costs[FORWARD] for costs in known) / GFLOPS_PER_S
    return 45.0 + 8.0 * len(known) / (os.cpu_count() or 1) + calls_s


def complete_measurement(directory: str, *, with_energy: bool = False, say: Say) -> None:
    """Measures a sweep at the default settings at which a finished arm has no row from this machine yet, or,
    with `with_energy`, one without its energy.
    """
    finished = typical_models(directory).keys()
    found = {setting: measured_rows(directory, setting, on=machine()) for setting in DEFAULTS}
    known = {
        s: {row["arm"] for row in rows if not with_energy or has_energy(row)} for s, rows in found.items()
    }
    if missing := [setting for setting, arms in known.items() if not finished <= arms]:
        measure_sweep(directory, missing, say=say)


def has_energy(row: MeasuredRow) -> bool:
    """Whether energy was read for a row, or its model could not be written."""
    return bool(row["why_not"]) or math.isfinite(row.get(ENERGIES[0], math.nan))


def typical_models(directory: str) -> dict[str, ModelRef]:
    """Returns a trained model of each finished arm whose models read images: that of its first seed.

    Raises:
        UsageError: if there is no sweep, or a checkpoint is gone.
    """
    own, found = SweepDir(directory), dict[str, ModelRef]()
    if (sweep := own.record()) is None:
        raise UsageError(f"no sweep in {directory}")
    for labels in sweep.trials.values():
        run, end = own.trial(labels), own.trial(labels).result()
        if labels["role"] == "trial" and labels["arm"] not in found and end and end.status == "finished":
            found[labels["arm"]] = read_model(run.checkpoints, whole=False)
    return {arm: model for arm, model in found.items() if model.run.model.image_side()}


def write_models(
    models: Mapping[str, ModelRef],
    runtime: Runtime,
    folder: str,
    say: Say,
    points: Mapping[str, RoutingOverrides] = {},
) -> tuple[dict[str, str], dict[str, str]]:
    """Writes the file of each model that a runtime opens, ONNX on all processors; returns arm -> file, and
    arm -> why it cannot be written. `points`: the operating points of those that have one.
    """
    endings: Mapping[Runtime, str] = {"onnx": ".onnx", "torch": SUFFIX}
    paths = {arm: f"{folder}/{number}{endings[runtime]}" for number, arm in enumerate(models)}
    if runtime == "torch":
        for arm, model in models.items():
            write_moe(model, paths[arm], trained=arm not in points)
        return paths, {}
    say(f"writing {len(models)} models as ONNX")
    jobs = [
        (model.location, asdict(points.get(arm, AS_TRAINED)), paths[arm]) for arm, model in models.items()
    ]
    failed = {
        arm: why for arm, why in zip(models, _write_onnx(jobs, _plugins(models), say), strict=True) if why
    }
    for arm, reason in failed.items():
        say(f"{arm} is left out, because it cannot be written for {runtime}: {reason}")
    return {arm: path for arm, path in paths.items() if arm not in failed}, failed


def write_moe(model: ModelRef, path: str, *, trained: bool = True) -> None:
    """Writes a model of this project as a file, or as a folder with its card. `trained`: with the settings of
    its training, of which the card has the results.
    """
    if not trained:
        tensors = model.load().state_dict()
        more = {"step": str(model.step)}
        write_export(path, tensors, model.run, signature=model.signature, more=more, fresh=True)
    elif model.location.endswith(SUFFIX):
        shutil.copy(model.location, path)
    else:
        export(model.location, path, fresh=True)


def _write_onnx(models: Sequence[Any], plugins: Mapping[str, str], say: Say) -> list[str]:
    """Writes the models of `WriterJob`; returns for each why it failed, empty if it did not."""
    said_s, done = time.monotonic(), count(1)

    def tell() -> None:
        nonlocal said_s
        number = next(done)
        if number < len(models) and time.monotonic() - said_s > SAY_EVERY_S:
            said_s = time.monotonic()
            say(f"{number} of {len(models)} models are written")

    workers = min(os.cpu_count() or 1, (len(models) + 1) // 2)
    shares = [models[number::workers] for number in range(workers)]
    threads = max(1, (os.cpu_count() or 1) // workers)
    found = [""] * len(models)
    with ThreadPoolExecutor(workers) as pool:
        jobs = [{"models": share, "plugins": plugins} for share in shares]
        for number, reasons in enumerate(
            pool.map(partial(_in_process, "writer", threads=threads, each=tell), jobs)
        ):
            found[number::workers] = reasons
    return found


def _in_process(module: str, job: Any, threads: int, each: Callable[[], None] = lambda: None) -> list[Any]:
    """Returns what a module of this package prints for a job, when it is all that a process does; calls
    `each` for each thing.

    Raises:
        UsageError: if the process failed, as where a package is missing.
    """
    own = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "OPENBLAS", "MKL")}
    own["PYTHONPATH"] = f"{SOURCES}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    found = list[Any]()
    with TemporaryFile("w+") as given, TemporaryFile("w+") as errors:
        json.dump(job, given)
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", f"orchestrator.inference.{module}"],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | own,
        )
        with process:
            assert process.stdout
            for line in process.stdout:
                if line.startswith(("{", '"')):
                    found.append(json.loads(line))
                    each()
        if process.returncode:
            errors.seek(0)
            raise UsageError(f"measuring failed: {(errors.read().strip().splitlines() or ['no word'])[-1]}")
    return found


def _plugins(models: Mapping[str, ModelRef]) -> dict[str, str]:
    names = [plugin for model in models.values() for plugin in model.run.plugins]
    return {plugin: text.decode() for plugin, text in shipped(dict.fromkeys(names)).items()}


def run_clock(
    models: Mapping[str, ModelRef], files: Mapping[str, str], setting: Setting, at_most_s: float
) -> tuple[list[Round], list[float]]:
    """Times the files of models in a process of its own; returns the rounds, and the peak memory of a process
    with each model, in MiB.
    """
    job: ClockJob = {
        "runtime": setting.runtime,
        "batch": setting.batch,
        "threads": setting.threads,
        "files": [*files.values()],
        "sides": [model.run.model.image_side() for model in models.values()],
        "plugins": _plugins(models),
        "at_most_s": at_most_s,
        "powercap": energy.POWERCAP,
    }
    first, *lines = _in_process("clock", job, setting.threads)
    rounds = [Round(**line | {"ms": (*map(tuple, line["ms"]),), "mj": (*line["mj"],)}) for line in lines]
    return rounds, first["memory_mib"]


def _rows(
    models: Mapping[str, ModelRef],
    files: Mapping[str, str],
    setting: Setting,
    rounds: Sequence[Round],
    memory: Sequence[float],
) -> Iterator[dict[str, Any]]:
    quiet = quiet_rounds(rounds)
    usual = median(each.reference_ms for each in rounds)
    known = energies(rounds) or [()] * len(files)
    for (arm, file), found, mib, mj in zip(files.items(), times(rounds), memory, known, strict=True):
        yield {
            "arm": arm,
            "model": models[arm].name,
            **asdict(setting),
            "precision": "float32",
            **asdict(found),
            **dict(zip(ENERGIES, mj, strict=False)),
            "memory_mib": mib,
            "file_mb": sum(path.stat().st_size for path in Path(file).parent.glob(f"{Path(file).name}*"))
            / 1e6,
            "rounds": len(quiet),
            "quiet": not any(is_disturbed(each, usual) for each in quiet),
            "machine": machine(),
            "host": made_by()[HOST],
            "why_not": "",
        }


def _unwritten(arm: str, model: str, setting: Setting, why: str) -> dict[str, Any]:
    times = dict.fromkeys(("p50", "q25", "q75", "p95", "p95_high", "memory_mib", "file_mb"), math.nan)
    where = {"machine": machine(), "host": made_by()[HOST]}
    return {
        **{"arm": arm, "model": model, **asdict(setting), "precision": "float32", **times},
        **{"rounds": 0, "quiet": True, **where, "why_not": why},
    }


def _round_rows(setting: Setting, rounds: Sequence[Round]) -> Iterator[dict[str, Any]]:
    usual = median(each.reference_ms for each in rounds)
    for number, each in enumerate(rounds):
        yield {
            **asdict(setting),
            "round": number,
            "foreign": each.foreign,
            "reference_ms": each.reference_ms,
            "disturbed": is_disturbed(each, usual),
        }


def disturbance(rounds: Sequence[Round]) -> str:
    """Says how many rounds other work disturbed, and what was done; empty if none was."""
    usual = median(each.reference_ms for each in rounds)
    disturbed = [each for each in rounds if is_disturbed(each, usual)]
    if not disturbed:
        return ""
    used = max(each.foreign for each in rounds)
    by = (
        f"others used up to {used:.1f} processors" if used > FOREIGN else "the machine was slower for a while"
    )
    if len(quiet_rounds(rounds)) < len(rounds):
        return f"{len(disturbed)} of {len(rounds)} rounds were disturbed ({by}), and are left out"
    return (
        f"{len(disturbed)} of {len(rounds)} rounds were disturbed ({by}): the order of times is right, their"
        " level may be too high. Measure again when the machine is quiet"
    )


def _is(row: MeasuredRow, setting: Setting) -> bool:
    return all(row[name] == value for name, value in asdict(setting).items())


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name, math.nan) for row in rows] for name in names}
