"""What is in a place already is kept, continued, or refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import UsageError
from orchestrator.prediction.plan import Plan, file_of, part_size, settle, tidy

PLAN = Plan(
    model="/runs/soft/checkpoints/step-00000200",
    model_sha256="a",
    images="/data/photos",
    images_sha256="b",
    count=1000,
    split=None,
    routing={},
    group=1,
    part=64,
    classes=("cat", "dog"),
)


@pytest.mark.parametrize(
    ("count", "group", "size"),
    [
        (1, 1, 64),
        (10_000, 1, 64),  # 157 parts
        (1_281_167, 1, 4096),  # 313 parts: 1,281,167 / 256 = 5004 would be too much to lose
        (256 * 100, 1, 100),
        (256 * 100, 8, 96),  # whole groups
        (10, 1000, 1000),
    ],
)
def test_size_of_parts(count, group, size):
    assert part_size(count, group) == size


def test_a_run_that_goes_on(tmp_path):
    """With the parts and the names that it began with, whatever moved meanwhile."""
    out = str(tmp_path / "out")
    assert settle(out, PLAN, fresh=False) == (PLAN, set())
    for part in (0, 7, 1_234_567):
        (tmp_path / "out" / file_of(part)).write_bytes(b"")
    now = replace(PLAN, model="/elsewhere", images="/elsewhere", part=128, classes=None)
    assert settle(out, now, fresh=False) == (replace(PLAN, classes=["cat", "dog"]), {0, 7, 1_234_567})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": "/runs/dense", "model_sha256": "c"},
            r"of another model \(/runs/soft/checkpoints/step-00000200; now /runs/dense\)",
        ),
        (
            {"count": 1001, "images_sha256": "c"},
            r"of other images \(1,000 at /data/photos; now 1,001 at /data/photos\)",
        ),
        ({"split": "val"}, r"of another split \(both; now val\)"),
        (
            {"routing": {"routing.k": 1}},
            r"at another operating point \(as trained; now \{'routing.k': 1\}\)",
        ),
        ({"group": 8}, r"with other routing groups \(1; now 8\)"),
    ],
)
def test_nothing_is_mixed(changes, message, tmp_path):
    out = str(tmp_path)
    settle(out, PLAN, fresh=False)
    other = replace(PLAN, **changes)
    assert settle(out, other, fresh=False) == (other, set())  # nothing is lost as long as nothing is there
    settle(out, PLAN, fresh=False)
    (tmp_path / file_of(3)).write_bytes(b"")
    (tmp_path / "notes.txt").write_bytes(b"")
    with pytest.raises(UsageError, match=rf"holds 1 files of predictions {message}: choose another --out"):
        settle(out, other, fresh=False)
    assert settle(out, other, fresh=True) == (other, set())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["_plan.json", "notes.txt"]


@pytest.mark.parametrize("plan", [None, "nonsense", "{}"])
def test_files_of_somebody_else_stay(plan, tmp_path):
    (tmp_path / file_of(0)).write_bytes(b"")
    if plan:
        (tmp_path / "_plan.json").write_text(plan)
    with pytest.raises(UsageError, match=r"parquet files and no _plan\.json: choose another --out"):
        settle(str(tmp_path), PLAN, fresh=False)
    assert (tmp_path / file_of(0)).exists()


def test_on_s3(bucket):
    out = bucket.uri("out")
    settle(out, PLAN, fresh=False)
    found, there = settle(out, PLAN, fresh=False)
    assert (found.model, there) == (PLAN.model, set())


def test_what_a_killed_process_began(tmp_path: Path):
    names = ["part-000001.parquet", "part-000002.parquet.0abc.tmp", "mine.tmp", "_plan.json"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    tidy(str(tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(set(names) - {names[1]})
