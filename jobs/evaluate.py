"""Evaluate trained models on any shards, as trained, at other operating points, or from few images per class.

  python jobs/evaluate.py quickstart/trials/w16-soft-seed0
  python jobs/evaluate.py models:/quickstart@pareto-knee --data /data/flowers-shards --per-class
  python jobs/evaluate.py sweep:quickstart --set routing.experts=2 --random-subsets 10
  python jobs/evaluate.py vmoe --set routing.k=1 routing.capacity=0.3 routing.priority=max
  python jobs/evaluate.py large --workers 8 --ep 8 --dtype bfloat16
  python jobs/evaluate.py timm-folder --data /data/imagenet-shards --classes imagenet

Weights stay as they are. Figures go to the run that trained the model, as eval/DATA/SPLIT/step-N/.., with the
tables, pages and pictures that belong to them.

There are several evaluations, below with their flags; each is chosen by its first flag. A file of your own,
given by --plugin, adds another.

--workers N lets N workers hold one model together, as in training; every evaluation can do that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial

from jobs._cli import (
    Evaluation,
    check_file,
    check_out,
    command,
    connect,
    models_of,
    named,
    print_table,
    with_flags,
)
from jobs._flags import MODELS, early, flag, parse
from jobs._record import Record
from jobs._sharded import Workers
from orchestrator.errors import UsageError
from orchestrator.evaluation.base import EvaluationRequest, EvaluationResult
from orchestrator.evaluation.kinds import EvaluationConfig


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags:
    model: tuple[str, ...] = flag(help=MODELS, positional=True, nargs="+")
    out: str | None = flag(
        None,
        "file or URI for all figures as JSON, with other files beside it; where a page is drawn, a directory"
        " or URI for page and pictures",
    )
    how: EvaluationConfig
    on: Evaluation
    by: Workers = Workers()


def main() -> None:
    if plugins := early("plugin"):  # their evaluations have flags
        with command(f"reading {named(plugins)}", plugins=plugins):
            pass
    flags = parse(EvaluateFlags, __doc__)
    with command(f"evaluating {named(flags.model)}", flags.on.places):
        evaluate(flags)


def evaluate(flags: EvaluateFlags) -> None:
    """Evaluates models; records, prints and writes what is found, also that before a failure."""
    from orchestrator import storage

    out, on, failure = storage.absolute(flags.out) if flags.out else None, flags.on, None
    if out:
        if folder := flags.how.folder():
            check_out(out, own=folder)
        else:
            check_file("--out", out)
    record, found = Record(on.places), list[EvaluationResult]()
    try:
        for result in flags.how.evaluate(request(flags, out, record)):
            found.append(result)
            keep(result, flags, out, record)
    except UsageError as error:
        failure = error
    if found:
        record.send()
    if out and (reports := [result.report for result in found if result.report]):
        storage.write_bytes(out, json.dumps(reports, indent=1).encode())
        print(f"figures  {flags.out}")
    if failure:
        raise failure


def request(flags: EvaluateFlags, out: str | None, record: Record) -> EvaluationRequest:
    """Returns what an evaluation is asked. Raises UsageError for a model that is missing."""
    on, by = flags.on, flags.by
    return EvaluationRequest(
        references=flags.model,
        models=models_of(flags.model, on.places),
        split=on.split,
        batch_size=on.batch_size,
        dtype=by.dtype,
        root=on.places.root(),
        out=out,
        path=on.path,
        paths=on.paths,
        images=on.images,
        sharding=partial(by.sharding, on=on),
        measure=partial(by.measure, on=on),
        say=lambda text: print(with_flags(text), flush=True),
        table=print_table,
        writable=writable,
        keep=lambda directory, tables: record.write(directory, {}, tables=tables),
        open_store=on.places.open_store,
        connect=connect,
    )


def writable(name: str, location: str) -> str:
    """Returns the absolute location of a file. Raises UsageError, with the flag, if it cannot be written."""
    from orchestrator import storage

    check_file(f"--{name.replace('_', '-')}", found := storage.absolute(location))
    return found


def keep(result: EvaluationResult, flags: EvaluateFlags, out: str | None, record: Record) -> None:
    """Records what was found in the run that trained the model, and writes its files beside --out."""
    from orchestrator import storage
    from orchestrator.runs.measurements import metric_name

    model, names = result.model, record.names(result.model, *result.paths)
    if out and result.report:
        for file, content in result.files.items():
            stem, _, ending = file.rpartition(".")
            result.report[stem] = f"{out.removesuffix('.json')}.{stem}-{metric_name(model.name)}.{ending}"
            storage.write_bytes(result.report[stem], content)
    if not names:
        return
    assert model.directory
    where = result.where or f"eval/{{0}}/{flags.how.kind}/{flags.on.split}/step-{model.step}"

    def full(name: str) -> str:
        name = f"{where}/{name}"
        for place, data in enumerate(names):
            name = name.replace(f"{{{place}}}", data)
        return name

    record.write(
        model.directory,
        {full(name): value for name, value in result.metrics.items()},
        tables={full(name): table for name, table in result.tables.items()},
        files={full(name): content for name, content in result.files.items()},
        data=names,
        labels=result.labels,
    )


if __name__ == "__main__":
    main()
