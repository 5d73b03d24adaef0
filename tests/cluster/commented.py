"""Checks that several cluster files share: lines to fill in, and no secrets."""

import re
from pathlib import Path

CLUSTER = Path(__file__).parents[2] / "cluster"
PLACEHOLDER = re.compile(r"\byour-|example\.com|0{12}|sg-0+|10\.0\.0\.2")


def header(path: Path) -> str:
    """The comment at the head of the file."""
    lines = path.read_text().splitlines()
    ends = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:ends])


def check_filled_in(path: Path) -> None:
    """Every line with a placeholder is marked as the user's, and the header names the mark."""
    body = path.read_text().removeprefix(header(path))
    body = re.sub(r">- # yours\n.*\n", "", body)  # a value of two lines
    for line in body.splitlines():
        if not line.lstrip().startswith("#") and PLACEHOLDER.search(line):
            assert "# yours" in line, line
    assert "# yours" in header(path)


def strings(value: object) -> list[str]:
    """Returns all keys and strings of a parsed file."""
    if isinstance(value, dict):
        return [text for pair in value.items() for one in pair for text in strings(one)]
    if isinstance(value, list):
        return [text for one in value for text in strings(one)]
    return [value] if isinstance(value, str) else []


def check_no_secrets(value: object) -> None:
    """The file has no cloud keys, private keys, long random strings or passwords, and no open address."""
    for text in strings(value):
        assert not re.search(r"AKIA[0-9A-Z]{16}|BEGIN [A-Z ]*PRIVATE|\b[0-9a-fA-F]{32,}\b", text), text
        assert not re.search(r"(?i)(password|secret|token)\w*=(?!\"?\$|token\b)", text), text
        assert "0.0.0.0" not in text, text
