"""Golden cases of text: cleaning, and how a text ends and is filled up."""

from moe.tokenizers import canonical, padded
from tests.golden_report import Arrays, Meta, Report


def canonicalize(z: Arrays, meta: Meta, report: Report) -> None:
    rows = list(zip(z["text"], z["keep"], z["expected"], strict=True))
    wrong = [row for row in rows if canonical(str(row[0]), str(row[1])) != row[2]]
    report.lines.append((f"{len(rows)} rows", str(wrong[:3]) if wrong else "exact", bool(wrong)))


def padding(z: Arrays, meta: Meta, report: Report) -> None:
    """Our texts keep their end when they are cut."""
    for number, case in enumerate(meta["cases"]):
        got = padded(z[f"in_{number}"].tolist(), case["length"], end=case["eos"], fill=case["pad"])
        report.exact(f"sticky_{number}", got == z[f"sticky_{number}"].tolist())
