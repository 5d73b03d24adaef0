"""Say which model of a sweep is the best within a bound, and how sure that is; write it ready to use.

  python jobs/answer.py quickstart --max-ms 0.5                    95th percentile of one image, on one thread
  python jobs/answer.py quickstart --max-ms 20 --batch 32 --threads 4
  python jobs/answer.py quickstart --max-mb 1 --max-gflops 0.001
  python jobs/answer.py quickstart --max-ms 2 --runtime torch --json

Times are those of the finished arms on this machine, measured alone and in turns; what was measured here at
the same setting is used again, unless --again. The upper end of a measured cost must keep its bound.

--out gets model.onnx with its preparation and its classes inside, read.py, which answers pictures by it, and
the folder moe/ with weights and a model card.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jobs._cli import Places, check_out, command
from jobs._flags import flag, parse, positive
from orchestrator.errors import UsageError
from orchestrator.names import run_name

if TYPE_CHECKING:
    from orchestrator.frontier.answer import Answer
    from orchestrator.frontier.points import Point

ONNX, READER, MOE = "model.onnx", "read.py", "moe"


@dataclass(frozen=True, kw_only=True)
class AnswerFlags:
    sweep: str = flag(help="name of a sweep", positional=True, read=run_name)
    max_ms: float | None = flag(
        None, "the most milliseconds of a call, by its 95th percentile", read=positive, metavar="MS"
    )
    max_mib: float | None = flag(
        None, "the most memory of a process that answers, in MiB", read=positive, metavar="MIB"
    )
    max_mb: float | None = flag(None, "the largest file, in MB", read=positive, metavar="MB")
    max_gflops: float | None = flag(
        None, "the most GFLOPs of a forward pass of one image, 2 per multiply-add", read=positive
    )
    batch: int = flag(1, "images of a call", least=1)
    threads: int = flag(1, "threads of a call", least=1)
    runtime: Literal["onnx", "torch"] = flag("onnx", "what runs the model: onnxruntime, or torch as it is")
    again: bool = flag(False, "measure again, also what was measured on this machine before")
    out: str | None = flag(
        None, "local folder for the best model; without it, nothing is written", metavar="DIR"
    )
    json: bool = flag(False, "print the answer as JSON")
    places: Places

    def __post_init__(self) -> None:
        if not any((self.max_ms, self.max_mib, self.max_mb, self.max_gflops)):
            raise UsageError("give a bound: --max-ms, --max-mib, --max-mb or --max-gflops")


def main() -> None:
    flags = parse(AnswerFlags, __doc__)
    to = sys.stderr if flags.json else sys.stdout
    with command(f"asking the sweep {flags.sweep}", plugins=flags.places.plugin, to=to):
        answer(flags)


def answer(flags: AnswerFlags) -> None:
    """Measures what is not known, prints the answer and writes its model. Exits with 1 if no arm keeps the
    bounds.
    """
    from orchestrator import storage
    from orchestrator.inference.measure import Setting, machine, measure_sweep, measured_rows
    from orchestrator.inference.points import with_inference
    from orchestrator.sweeps.build import sweep_frontier
    from orchestrator.sweeps.publish import publish_and_send

    directory = flags.places.below(flags.sweep)
    out = storage.absolute(flags.out) if flags.out else None
    if out:
        check_out(out, own=(ONNX,), apart=(directory,))
    setting = Setting(runtime=flags.runtime, batch=flags.batch, threads=flags.threads)
    frontier, _, _ = sweep_frontier(directory)
    here = [] if flags.again else measured_rows(directory, setting, on=machine())
    finished = {point.arm for point in frontier.points if point.status == "finished"}
    if (flags.max_ms or flags.max_mib or flags.max_mb) and not finished <= {row["arm"] for row in here}:
        say = lambda line: print(line, flush=True, file=sys.stderr if flags.json else sys.stdout)  # noqa: E731
        here = measure_sweep(directory, [setting], say=say)
        if missing := publish_and_send(directory, flags.places.open_store)[1]:
            say(missing)
    found = with_inference(frontier, here).answer(
        max_ms=flags.max_ms, max_mib=flags.max_mib, max_mb=flags.max_mb, max_gflops=flags.max_gflops
    )
    if flags.json:
        print(json.dumps(as_json(found, setting, here), indent=1))
    else:
        print(f"{setting}; {machine()}" if here else "computed costs, which no machine changes")
        print(found)
    if found.best and out:
        write(found.best, directory, out, to=sys.stderr if flags.json else sys.stdout)
    if not found.best:
        sys.exit(1)


def as_json(found: Answer, setting: Any, rows: Any) -> dict[str, Any]:
    """Returns the answer for programs; costs have their upper ends."""
    from dataclasses import asdict

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
        }

    return {
        "bounds": dict(found.bounds),
        **(asdict(setting) | {"machine": machine()} if rows else {}),
        "best": of(found.best),
        "not_significantly_worse": [of(point) for point in found.tied],
        "worse": found.others,
        "nearest": of(found.nearest),
        "looser": of(found.looser),
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
    from orchestrator.checkpoint.weights import export
    from orchestrator.runs.sweep_directory import SweepDir

    if not storage.is_local(out):
        raise UsageError(f"--out {out} must be a local folder")
    own = SweepDir(directory)
    sweep = own.record()
    assert sweep
    model = read_model(own.trial(sweep.trials[point.typical_run]).checkpoints)
    Path(out).mkdir(parents=True, exist_ok=True)
    write_onnx(model.load(), f"{out}/{ONNX}", model.signature)
    export(model.location, f"{out}/{MOE}", fresh=True)
    text = files("orchestrator.inference").joinpath("reader.py").read_bytes()
    Path(out, READER).write_bytes(text)
    print(f"model    {out}: python {out}/{READER} PICTURE ..    {point.typical_run}", file=to)


if __name__ == "__main__":
    main()
