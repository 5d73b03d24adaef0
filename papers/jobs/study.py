"""Train small models on the digits in minutes, and measure what the papers claim about trained routers.

python papers/jobs/study.py capacity
python papers/jobs/study.py specialisation --data /data/mnist
python papers/jobs/study.py specialisation --seeds 5 --stop-at 0.94 --out /tmp/specialisation
python papers/jobs/study.py faster-inference

Prints a table; writes table and picture to --out, and records them below the storage. Seeds decide everything
but times.
"""

from __future__ import annotations

import json
import pkgutil
import time
from dataclasses import dataclass

from jobs._cli import Places, check_writable, command, print_table
from jobs._flags import flag, parse
from jobs._record import Record
from orchestrator.errors import UsageError
from papers import STUDIES


def study_name(text: str) -> str:
    if text not in STUDIES:
        raise UsageError(f"unknown study {text!r}; known: {', '.join(STUDIES)}")
    return text


@dataclass(frozen=True, kw_only=True)
class StudyFlags:
    name: str = flag(help="a study of the list below", positional=True, metavar="NAME", read=study_name)
    seeds: int = flag(3, "models of each kind", least=1)
    stop_at: float | None = flag(
        None, "specialisation: accuracy of all experts at which nets are compared; default: 0.95"
    )
    data: str | None = flag(
        None, "specialisation: packed grey images of one size, as MNIST; default: the digits of scikit-learn"
    )
    out: str | None = flag(
        None, "directory or URI for picture and table; default: a new one in studies/ below the storage"
    )
    places: Places

    def __post_init__(self) -> None:
        for given, name in ((self.stop_at, "--stop-at"), (self.data, "--data")):
            if given is not None and self.name != "specialisation":
                raise UsageError(f"{name} is a flag of the study specialisation, not of {self.name}")
        if self.stop_at is not None and not 0 < self.stop_at < 1:
            raise UsageError(f"--stop-at {self.stop_at} must lie between 0 and 1")


def main() -> None:
    studies = "\n".join(f"  {name:18} {about}" for name, (about, _) in STUDIES.items())
    flags = parse(StudyFlags, __doc__, epilog=f"studies:\n{studies}")
    with command(f"study {flags.name}", flags.places):
        run_study(flags)


def run_study(flags: StudyFlags) -> None:
    """Trains and measures what the study compares; prints and records the result."""
    import torch

    from orchestrator import storage
    from orchestrator.frontier.drawing import png

    # The models are small: more threads take longer.
    torch.set_num_threads(1)
    name = f"{flags.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = flags.places.below("studies", name)
    out = storage.absolute(flags.out) if flags.out else folder
    check_writable("--out" if flags.out else "--storage", out)
    options: dict[str, object] = {} if flags.stop_at is None else {"stop_at": flags.stop_at}
    if flags.data:
        options["data"] = flags.places.shards(flags.data)
    study = pkgutil.resolve_name(STUDIES[flags.name][1])
    result = study(flags.seeds, lambda line: print(line, flush=True), **options)
    rows = [
        [f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row]
        for row in zip(*result.table.values(), strict=True)
    ]
    print_table(result.table, rows, title=result.title, left=0)
    for note in result.notes:
        print(note)
    picture = png(result.figure)
    tables = {"table": result.table, **result.details}
    storage.write_bytes(storage.join(out, f"{flags.name}.png"), picture)
    storage.write_bytes(storage.join(out, f"{flags.name}.json"), json.dumps(tables, indent=1).encode())
    record = Record(flags.places)
    record.write(
        folder,
        {f"study/{name}": value for name, value in result.metrics.items()},
        tables={f"{name}.json": table for name, table in tables.items()},
        files={f"{flags.name}.png": picture},
        labels={"role": "study", "study": flags.name, "seeds": str(flags.seeds), "title": result.title},
    )
    print(f"{out}/{flags.name}.png and .json")
    record.send()


if __name__ == "__main__":
    main()
