"""Say which model of a sweep is the best within a bound, and how sure that is; write it ready to use.

  python jobs/answer.py quickstart --max-ms 0.5                    95th percentile of one image, on one thread
  python jobs/answer.py quickstart --max-ms 20 --batch 32 --threads 4
  python jobs/answer.py quickstart --max-mb 1 --max-gflops 0.001
  python jobs/answer.py quickstart --max-ms 2 --runtime torch --json
  python jobs/answer.py quickstart --max-usd 0.01                  of a million images, by jobs/prices.yaml
  python jobs/answer.py quickstart --max-mj 20     energy of an image, where Linux shows that of processors
  python jobs/answer.py ./flowers --max-ms 5 --out best

A folder of pictures, with a folder for each class, is packed first, and the arms of the sweep quickstart that
can keep the bound are trained on it, with the fields of --set; a folder of packed shards is taken as it is.
The sweep has the folder's name, and the same command goes on where it was interrupted.

Times are those of the finished arms on this machine, measured alone and in turns; what was measured here at
the same setting is used again, unless --again. The upper end of a measured cost must keep its bound.

--out gets model.onnx with its preparation and its classes inside, read.py, which answers pictures by it, and
the folder weights/ of this project's own format, with a model card.
"""

from __future__ import annotations

import json
import math
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jobs._cli import OUT_OF_BUDGET, UNSENT, Places, check_out, command
from jobs._flags import FIELDS, flag, parse, positive
from jobs.pack_shards import PackFlags, pack_source
from jobs.pareto_sweep import SweepFlags, sweep
from jobs.train import RunFlags
from orchestrator.errors import UsageError
from orchestrator.names import run_name

if TYPE_CHECKING:
    from orchestrator.frontier.answer import Answer
    from orchestrator.frontier.points import Point

ONNX, READER, WEIGHTS = "model.onnx", "read.py", "weights"
PACKED = "packed_from.json"  # beside the shards of a folder: its files and their bytes
SMALL = 48  # pixels of a side, up to which pictures are scaled to 32
BATCH, EPOCHS, LEAST_STEPS, MOST_STEPS = 128, 30, 100, 1500  # of the models of a folder
SEEDS = 2  # the fewest whose error is known


def subject(text: str) -> str:
    """Reads the name of a sweep, or a location, which has a slash."""
    return text if "/" in text else run_name(text)


@dataclass(frozen=True, kw_only=True)
class AnswerFlags:
    sweep: str = flag(
        help="name of a sweep, or a folder of pictures or shards, as ./flowers", positional=True, read=subject
    )
    max_ms: float | None = flag(
        None, "the most milliseconds of a call, by its 95th percentile", read=positive, metavar="MS"
    )
    max_mib: float | None = flag(
        None, "the most memory of a process that answers, in MiB", read=positive, metavar="MIB"
    )
    max_mb: float | None = flag(None, "the largest file, in MB", read=positive, metavar="MB")
    max_mj: float | None = flag(
        None, "the most energy of processors for an image, in millijoules", read=positive, metavar="MJ"
    )
    max_usd: float | None = flag(
        None,
        "the highest price of a million images, in USD, by jobs/prices.yaml",
        read=positive,
        metavar="USD",
    )
    max_gflops: float | None = flag(
        None, "the most GFLOPs of a forward pass of one image, 2 per multiply-add", read=positive
    )
    batch: int = flag(1, "images of a call", least=1)
    threads: int = flag(1, "threads of a call", least=1)
    runtime: Literal["onnx", "torch"] = flag("onnx", "what runs the model: onnxruntime, or torch as it is")
    again: bool = flag(False, "measure again, also what was measured on this machine before")
    set: tuple[tuple[str, Any], ...] = FIELDS
    budget_hours: float | None = flag(
        None, "of a folder: device-hours of training; trials that do not fit are not started", read=positive
    )
    out: str | None = flag(
        None, "local folder for the best model; without it, nothing is written", metavar="DIR"
    )
    json: bool = flag(False, "print the answer as JSON")
    places: Places

    def __post_init__(self) -> None:
        if not any(self.bounds().values()):
            raise UsageError(
                "give a bound: --max-ms, --max-mib, --max-mb, --max-mj, --max-usd or --max-gflops"
            )
        if (self.set or self.budget_hours) and "/" not in self.sweep:
            raise UsageError("--set and --budget-hours do nothing with a sweep, whose models are trained")

    def bounds(self) -> dict[str, float | None]:
        """Returns the arguments of `Frontier.answer`."""
        return {name: value for name, value in vars(self).items() if name.startswith("max_")}

    def bound(self) -> float | None:
        """Returns the milliseconds of the calls that a plan times; None if others are bound."""
        return self.max_ms if (self.runtime, self.batch, self.threads) == ("onnx", 1, 1) else None


def main() -> None:
    flags = parse(AnswerFlags, __doc__)
    to = sys.stderr if flags.json else sys.stdout
    with command(f"asking {flags.sweep}", plugins=flags.places.plugin, to=to):
        if "/" in flags.sweep:
            with redirect_stdout(to):
                flags = replace(flags, sweep=trained_on(flags), set=(), budget_hours=None)
        answer(flags)


def trained_on(flags: AnswerFlags) -> str:
    """Packs a folder of pictures, unless it holds shards, and trains arms on it; returns the sweep's name. A
    budget that is used up ends the training, and not the command; neither does a tracker that is away.
    """
    from orchestrator import storage
    from orchestrator.data.manifest import has_manifest, open_manifest
    from orchestrator.runs.run_directory import kind_of
    from orchestrator.runs.sweep_directory import SweepDir

    folder = storage.absolute(flags.sweep).rstrip("/")
    if kind_of(folder):
        raise UsageError(f"{folder} is a run or a sweep: give the sweep's name, without a slash")
    name = name_of(folder)
    directory, packed = flags.places.below(name), has_manifest(folder)
    if flags.out:
        check_out(storage.absolute(flags.out), own=(ONNX,), apart=(directory, folder))
    shards = folder if packed else flags.places.below("data", name)
    record = SweepDir(directory).record()
    was = record.base["data"]["path"] if record else shards
    # The storage may have been moved: whether the images are the same, the sweep compares.
    if was.rpartition("/")[2] != shards.rpartition("/")[2]:
        raise UsageError(
            f"the sweep {name} was trained on {was}: give its name to ask it, or rename {folder}"
        )
    if packed:
        print(f"images   {shards}, as they were packed")
    else:
        pack_folder(folder, shards)
    fields = {**sizes(shards, open_manifest(shards).rows("train")), **dict(flags.set)}
    print("settings " + " ".join(f"{field}={value}" for field, value in fields.items()))
    run = RunFlags(name=name, data=shards, set=tuple(fields.items()), places=flags.places)
    seeds = max(SEEDS, len(record.seeds) if record else 0)
    try:
        chosen = {"max_ms": flags.bound(), "seeds": seeds, "budget_hours": flags.budget_hours}
        sweep(SweepFlags(**chosen, confirm=0, measure="never", run=run))
    except SystemExit as end:
        if end.code not in (OUT_OF_BUDGET, UNSENT):
            raise
    return name


def pack_folder(folder: str, shards: str) -> None:
    """Packs a folder, unless that was done before. Raises UsageError if other pictures, or those of another
    folder, were packed there.
    """
    from orchestrator import storage
    from orchestrator.data.manifest import has_manifest
    from orchestrator.runs.run_directory import read_json, write_json

    record = storage.join(shards, PACKED)
    now = {"folder": folder, "files": storage.files(folder)}
    if not has_manifest(shards):
        pack_source(PackFlags(source=f"folder:{folder}", out=shards))
        write_json(record, now)
    elif (was := read_json(record)) != now:
        same = was and was["folder"] == folder
        what = "other pictures of this folder" if same else was["folder"] if was else "other images"
        raise UsageError(
            f"{shards} was packed from {what}: remove it, rename {folder}, or pack that with"
            " jobs/pack_shards.py and give the shards in its place"
        )
    else:
        print(f"images   {shards}, packed before")


def name_of(folder: str) -> str:
    """Returns the name of a folder's sweep: that of the folder, of characters that a name may have."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.rpartition("/")[2])
    try:
        return run_name(name)
    except UsageError:  # reserved, or it begins otherwise
        return run_name(f"images-{name.lstrip('-._')}")


def sizes(shards: str, images: int) -> dict[str, int]:
    """Returns sizes that suit the pictures: 64 tokens of as many pixels as most pictures have, batches of at
    most 128, and 30 epochs, within bounds.
    """
    from orchestrator import storage
    from orchestrator.packing.report import REPORT
    from orchestrator.runs.run_directory import read_json

    known = read_json(storage.join(shards, REPORT)) or {}
    sides = [known[name]["median"] for name in ("height", "width") if known.get(name)]
    side = 32 if sides and min(sides) <= SMALL else 64
    batch = min(2 ** int(math.log2(images)), BATCH)
    steps = min(max(EPOCHS * images // batch, LEAST_STEPS), MOST_STEPS)
    model = {"model.image_size": side, "model.patch_size": side // 8}
    return {**model, "data.batch_size": batch, "train.steps": steps}


def answer(flags: AnswerFlags) -> None:
    """Measures what is not known, prints the answer and writes its model. Exits with 1 if no arm keeps the
    bounds.
    """
    from orchestrator import storage
    from orchestrator.costs import ENERGY, USD
    from orchestrator.inference.measure import Setting, has_energy, machine, measure_sweep, measured_rows
    from orchestrator.inference.points import with_inference
    from orchestrator.runs.sweep_directory import SweepDir
    from orchestrator.sweeps.budget import CORE, PRICES, core_usd_per_hour
    from orchestrator.sweeps.build import check_costs_of_use, sweep_frontier
    from orchestrator.sweeps.operating import points_in_files
    from orchestrator.sweeps.publish import publish_and_send

    directory = flags.places.below(flags.sweep)
    out = storage.absolute(flags.out) if flags.out else None
    if out:
        check_out(out, own=(ONNX,), apart=(directory,))
    if SweepDir(directory).record() is None and Path(flags.sweep).is_dir():
        raise UsageError(f"no sweep {flags.sweep}; the folder of that name is ./{flags.sweep}")
    setting = Setting(runtime=flags.runtime, batch=flags.batch, threads=flags.threads)
    frontier, _, _ = sweep_frontier(directory)
    here = [] if flags.again else measured_rows(directory, setting, on=machine())
    points = points_in_files(frontier)
    finished = {point.arm for point in frontier.points if point.status == "finished"} | points.keys()
    known = {row["arm"] for row in here if not flags.max_mj or has_energy(row)}
    measured = any(most for name, most in flags.bounds().items() if name != "max_gflops")
    if flags.max_usd:
        check_costs_of_use([USD])
    if measured and not finished <= known:
        if flags.max_mj:
            check_costs_of_use([ENERGY])
        say = lambda line: print(line, flush=True, file=sys.stderr if flags.json else sys.stdout)  # noqa: E731
        here = measure_sweep(directory, [setting], points=points, say=say)
        if missing := publish_and_send(directory, flags.places.open_store)[1]:
            say(missing)
    priced = with_inference(frontier, here, usd_per_hour=core_usd_per_hour())
    found = priced.answer(**flags.bounds())
    if flags.json:
        print(json.dumps(as_json(found, setting, here), indent=1))
    else:
        print(f"{setting}; {machine()}" if here else "computed costs, which no machine changes")
        print(found)
        if measured and not all(row["quiet"] for row in here):
            print("Other work disturbed the measurement: the order is right, the level may be high.")
        if here and found.best and (usd := found.best.costs.get(USD)) and not flags.max_usd:
            arm = found.best.arm
            price = f"{usd:.4g} USD with {arm} at its median time"
            print(f"A million images cost {price}, by the {CORE} of {Path(PRICES).name}.")
    if found.best and out:
        write(found.best, directory, out, to=sys.stderr if flags.json else sys.stdout)
    if not found.best:
        sys.exit(1)


def as_json(found: Answer, setting: Any, rows: Any) -> dict[str, Any]:
    """Returns the answer for programs; costs have their upper ends."""
    from dataclasses import asdict

    from orchestrator.costs import USD
    from orchestrator.frontier.answer import upper
    from orchestrator.inference.measure import machine

    def of(point: Point | None) -> dict[str, Any] | None:
        if point is None:
            return None
        return {
            "arm": point.arm,
            "model": point.typical_run,
            found.quality_name: point.quality,
            "standard_error": None if math.isnan(point.standard_error) else point.standard_error,
            "costs": {n: [point.costs[n], upper(point, n)] for n in found.bounds if n in point.costs},
            "usd_per_million_images": point.costs.get(USD) if rows else None,
        }

    return {
        "bounds": dict(found.bounds),
        **(asdict(setting) | {"machine": machine()} if rows else {}),
        **({"quiet": all(row["quiet"] for row in rows)} if rows else {}),
        "best": of(found.best),
        "not_significantly_worse": [of(point) for point in found.tied],
        "worse": found.others,
        "nearest": of(found.nearest),
        "looser": of(found.looser),
        "better": of(found.better),
        "tighter": of(found.tighter),
        "significant_from": found.errors.significant(found.best, found.best)
        if found.best and found.errors.known
        else None,
        "words": found.lines(),
    }


def write(point: Point, directory: str, out: str, *, to: Any) -> None:
    """Writes the model of an arm: of several seeds the one nearest to their mean."""
    from importlib.resources import files

    from orchestrator import storage
    from orchestrator.checkpoint.graphs import write_onnx
    from orchestrator.checkpoint.models import read_model
    from orchestrator.frontier.points import OPERATING_POINT
    from orchestrator.inference.measure import write_moe
    from orchestrator.runs.sweep_directory import SweepDir
    from orchestrator.sweeps.operating import point_of

    if not storage.is_local(out):
        raise UsageError(f"--out {out} must be a local folder")
    own = SweepDir(directory)
    sweep = own.record()
    assert sweep
    model = read_model(own.trial(sweep.trials[point.typical_run]).checkpoints).at_point(point_of(point))
    Path(out).mkdir(parents=True, exist_ok=True)
    off = write_onnx(model.load(), f"{out}/{ONNX}", model.signature)
    write_moe(model, f"{out}/{WEIGHTS}", trained=OPERATING_POINT not in point.settings)
    text = files("orchestrator.inference").joinpath("reader.py").read_bytes()
    Path(out, READER).write_bytes(text)
    print(f"model    {out}: python {out}/{READER} PICTURE ..    {point.typical_run}", file=to)
    print(f"         largest difference {off:.1e} of the largest output, on random images", file=to)


if __name__ == "__main__":
    main()
