"""Golden cases of the papers: labels of VTAB."""

from papers.vmoe import vtab
from tests.golden_report import Arrays, Meta, Report


def vtab_labels(z: Arrays, meta: Meta, report: Report) -> None:
    """Returns what the classes are made of; of a count, the objects."""
    for task in sorted({task for task, *_ in meta["cases"]}):
        rule = getattr(vtab, task)
        cases = [(value, label) for name, value, label in meta["cases"] if name == task]
        found = [rule(len(value) if task == "clevr_count" else value) for value, _ in cases]
        report.exact(task, found == [label for _, label in cases])


FAMILIES = {"vtab": vtab_labels}
