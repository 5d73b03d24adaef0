"""Which images go to which file, fixed before the first of them: what is there need not be done again.

A part's file appears whole or not at all. `_plan.json` says whose predictions these are, so that those of
another model or of other images never come among them; readers of parquet pass by names that begin with _.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator import storage
from orchestrator.checkpoint.files import SUFFIX
from orchestrator.checkpoint.manifest import MANIFEST, hashed
from orchestrator.errors import UsageError

PLAN = "_plan.json"
PART = re.compile(r"part-(\d{6,})\.parquet")  # as `file_of` names them
FEWEST, MOST, PARTS = 64, 4096, 256  # images of a part, and about how many parts there should be
SAYS = {
    "model_sha256": "of another model",
    "images_sha256": "of other images",
    "split": "of another split",
    "routing": "at another operating point",
    "group": "with other routing groups",
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Attributes:
    model_sha256: of its checkpoint's manifest, or of the file.
    images: where they lie; `count` of them.
    split: of shards; None: all of them.
    routing: what differs from the model as trained.
    group: images that are routed together.
    part: images of a part; whole groups.
    classes: names by index; None if they are unknown.
    """

    model: str
    model_sha256: str
    images: str
    images_sha256: str
    count: int
    split: str | None
    routing: Mapping[str, Any]
    group: int
    part: int
    classes: Sequence[str] | None


def part_size(count: int, group: int) -> int:
    """Images of a part: few enough that little is lost with a part and that many can work on them."""
    wanted = min(MOST, max(FEWEST, count // PARTS))
    return max(group, wanted // group * group)


def digest_of(model: str) -> str:
    """SHA-256 of a checkpoint's manifest, which vouches for its files, or of an exported file."""
    return hashed(model if model.endswith(SUFFIX) else storage.join(model, MANIFEST)).sha256


def file_of(part: int) -> str:
    return f"part-{part:06d}.parquet"


def settle(out: str, plan: Plan, *, fresh: bool) -> tuple[Plan, set[int]]:
    """What holds for `out`: the plan that began there, else `plan`; and the parts that are there.

    Raises:
        UsageError: if there are predictions of something else and they are not to go (`fresh`).
    """
    names = storage.names(out)
    there = {int(match[1]) for name in names if (match := PART.fullmatch(name))}
    before = _read(storage.join(out, PLAN)) if PLAN in names else None
    if there and not fresh:
        if before is None:
            raise UsageError(f"{out} holds parquet files and no {PLAN}: choose another --out, or use --fresh")
        different = [field for field in SAYS if getattr(before, field) != getattr(plan, field)]
        if different:
            field = different[0]
            was, now = _shown(before, field), _shown(plan, field)
            raise UsageError(
                f"{out} holds {len(there)} files of predictions {SAYS[field]} ({was}; now {now}): choose"
                " another --out, or use --fresh to begin again"
            )
        return before, there
    for part in there:
        storage.delete(storage.join(out, file_of(part)))
    storage.write_bytes(storage.join(out, PLAN), json.dumps(asdict(plan), indent=1).encode())
    return plan, set()


def tidy(out: str) -> None:
    """Drops what processes that were killed had begun to write."""
    for name in storage.names(out):
        if re.fullmatch(r"part-\d{6,}\.parquet\..*\.tmp", name):
            storage.delete(storage.join(out, name))


def _read(location: str) -> Plan | None:
    """None for a file that is none of ours."""
    try:
        return Plan(**json.loads(storage.read_bytes(location)))
    except (ValueError, TypeError):
        return None


def _shown(plan: Plan, field: str) -> str:
    if field == "model_sha256":
        return plan.model
    if field == "images_sha256":
        return f"{plan.count:,} at {plan.images}"
    value = getattr(plan, field)
    return "as trained" if value == {} else "both" if value is None else str(value)
