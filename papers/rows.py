"""The systems, experiments and tables of the papers, a row each: how to run it, or why it is not built.

``rows.csv`` has them. The first letter of an id is its paper. The page ``docs/papers.md`` is made from it.
"""

import csv
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple, cast

PAPERS = {
    "A": "From Sparse to Soft Mixtures of Experts (Puigcerver et al. 2024)",
    "B": "Routers in Vision Mixture of Experts (Liu et al. 2024)",
    "C": "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts (Chung et al. 2024)",
    "D": "SoftMoE: Beyond Hard Expert Selection (calmops)",
    "E": "Scaling Vision with Sparse Mixture of Experts (Riquelme et al. 2021)",
}
HEAD = """\
# The papers, row by row

What each paper describes, and the command, setting or test that has it here. *In part* says what is missing,
*not built* says why. `--sweep NAME` and `--scale NAME` are flags of `jobs/pareto_sweep.py`, fields as
`model.moe.router.k` go to `--set`, and goldens are arrays of other implementations
(`python -m tests.golden tests/goldens`). `jobs/pareto_sweep.py --list` prints the same rows. No accuracy of
the papers was reproduced here.

*run by* is the [lane of tests](trust.md#tests) that runs the row in its cheapest form, with small models and
images that come with the project. *its arms* means that nothing is trained: the configs are built, and
compared with the papers where these print a number. `papers/rows.csv` names each test."""

NOT_RUN = "not run by a lane"
State = Literal["works", "in part", "not built"]


class Row(NamedTuple):
    id: str
    what: str
    state: State
    how: str
    lane: str
    test: str


def rows() -> list[Row]:
    with Path(__file__).with_name("rows.csv").open() as file:
        return [Row(**{**row, "state": cast(State, row["state"])}) for row in csv.DictReader(file)]


def page() -> str:
    """Returns ``docs/papers.md``."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    listed = rows()
    yield HEAD
    yield f"\n{count(listed)}."
    for letter, title in PAPERS.items():
        yield f"\n## {title}\n\n| | what | state | how | run by |\n|---|---|---|---|---|"
        for row in listed:
            if row.id.startswith(letter):
                yield f"| {row.id} | {row.what} | {row.state} | {row.how} | {row.lane} |"


def count(listed: list[Row]) -> str:
    states = Counter(row.state for row in listed)
    return f"{len(listed)} rows: " + ", ".join(f"{number} {state}" for state, number in states.items())
