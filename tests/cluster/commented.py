"""What the comment at the head of a file promises: prices, and which lines are to be filled in."""

import re
from pathlib import Path

import yaml

CLUSTER = Path(__file__).parents[2] / "cluster"
PLACEHOLDER = re.compile(r"\byour-|example\.com|0{12}|sg-0+|10\.0\.0\.2")


def header(path: Path) -> str:
    """The comment that the file opens with."""
    lines = path.read_text().splitlines()
    ends = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:ends])


def check_prices(path: Path, counts: dict[str, int]) -> None:
    """Lines `<what> .. <n> x <device> = <usd> usd` agree with the price table, and so does their sum.

    `counts`: how many of each line may be up at once; spot counts as on demand, as a bound.
    """
    table = yaml.safe_load((CLUSTER / "prices.yaml").read_text())
    total, seen = 0.0, set[str]()
    for what, number, device, usd in re.findall(r"#   (\w+).* (\d+) x (\S+) += +([\d.]+) usd", header(path)):
        assert float(usd) == round(int(number) * table[device]["usd_per_hour"], 2), what
        total += counts[what] * float(usd)
        seen.add(what)
    assert seen == set(counts)
    stated = re.search(r"all of it up: at most ([\d.]+) usd", header(path))
    assert stated
    assert float(stated[1]) == round(total, 2)


def check_filled_in(path: Path) -> None:
    """Every line with a placeholder is marked as the user's, and the header says how to find them."""
    body = path.read_text().removeprefix(header(path))
    body = re.sub(r">- # yours\n.*\n", "", body)  # marked where it begins
    for line in body.splitlines():
        if not line.lstrip().startswith("#") and PLACEHOLDER.search(line):
            assert "# yours" in line, line
    assert "# yours" in header(path)


def strings(value: object) -> list[str]:
    """All keys and strings of a parsed file, without its comments."""
    if isinstance(value, dict):
        return [text for pair in value.items() for one in pair for text in strings(one)]
    if isinstance(value, list):
        return [text for one in value for text in strings(one)]
    return [value] if isinstance(value, str) else []


def check_no_secrets(value: object) -> None:
    """No keys of clouds, no private keys, nothing long and random, no password that is spelt out."""
    for text in strings(value):
        assert not re.search(r"AKIA[0-9A-Z]{16}|BEGIN [A-Z ]*PRIVATE|\b[0-9a-fA-F]{32,}\b", text), text
        assert not re.search(r"(?i)(password|secret|token)\w*=(?!\"?\$|token\b)", text), text
        assert "0.0.0.0" not in text, text
