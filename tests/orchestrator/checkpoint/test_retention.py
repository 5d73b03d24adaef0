"""What stays: as a pure function, and on storage, whatever is damaged or interrupted."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint import retention
from orchestrator.checkpoint.retention import (
    collect_garbage,
    drop_optimizer,
    quality_of,
    retain,
    staying,
)
from orchestrator.checkpoint.run import Checkpoints
from orchestrator.checkpoint.state import load
from orchestrator.config import CheckpointConfig
from tests.orchestrator.checkpoint.counted import (
    IN_STEP,
    expected,
    flip,
    folder,
    odd,
    said,
    save,
    saved,
    step_restored,
)
from tests.orchestrator.checkpoint.operations import counting

QUALITIES = st.none() | st.floats(0, 1) | st.just(math.nan) | st.sampled_from([0.25, 0.5])
FOUND = st.dictionaries(st.integers(0, 10**6), QUALITIES, max_size=20)
KEEP = st.builds(
    CheckpointConfig,
    keep_last=st.integers(1, 25),
    keep_best=st.integers(0, 25),
    keep_every=st.none() | st.integers(1, 30),
)


def keep(last: int = 1, best: int = 0, every: int | None = None) -> CheckpointConfig:
    return CheckpointConfig(asynchronous=False, keep_last=last, keep_best=best, keep_every=every)


BY_HAND = [  # steps with qualities, what is kept, what stays
    ({}, keep(2, 2, 2), set()),
    ({10: None, 20: None, 30: None}, keep(2), {20, 30}),
    ({10: None, 20: None, 30: None}, keep(9), {10, 20, 30}),
    ({30: None, 10: None, 20: None}, keep(1), {30}),  # not the order of insertion
    ({10: 0.9, 20: 0.5, 30: 0.7}, keep(1, 1), {10, 30}),
    ({10: 0.9, 20: 0.5, 30: 0.7}, keep(1, 2), {10, 30}),
    ({10: 0.5, 20: 0.9, 30: 0.7, 40: 0.1}, keep(1, 2), {20, 30, 40}),
    ({10: 0.5, 20: 0.9, 30: 0.9, 40: None}, keep(1, 1), {20, 40}),  # of equals the first
    ({10: 0.5, 20: 0.9, 30: 0.9, 40: None}, keep(1, 7), {10, 20, 30, 40}),  # more than there are
    ({10: math.nan, 20: 0.1, 30: None, 40: None}, keep(1, 1), {20, 40}),  # no number is not the best
    ({10: math.nan, 20: None, 30: None}, keep(1, 3), {30}),
    ({10: 0.0, 20: None, 30: None}, keep(1, 1), {10, 30}),  # zero was measured
    ({10: -math.inf, 20: math.inf, 30: 0.0}, keep(1, 1), {20, 30}),
    ({100: None, 150: None, 200: None, 250: None}, keep(1, 0, 100), {100, 200, 250}),
    ({0: None, 7: None}, keep(1, 0, 5), {0, 7}),
]


@pytest.mark.parametrize(("found", "kept", "stay"), BY_HAND)
def test_by_hand(found, kept, stay):
    assert staying(found, kept) == stay


@given(FOUND, KEEP)
def test_laws(found, kept):
    stay = staying(found, kept)
    assert stay <= found.keys()
    assert stay >= set(sorted(found)[-kept.keep_last :])
    measured = {step: q for step, q in found.items() if q is not None and not math.isnan(q)}
    best = sorted(measured.values(), reverse=True)[: kept.keep_best]
    assert sorted((measured[s] for s in stay & measured.keys()), reverse=True)[: len(best)] == best
    assert len(stay) <= kept.keep_last + kept.keep_best + (
        sum(step % kept.keep_every == 0 for step in found) if kept.keep_every else 0
    )
    if kept.keep_every:
        assert all(step in stay for step in found if step % kept.keep_every == 0)
    assert staying({step: found[step] for step in stay}, kept) == stay


@given(FOUND.filter(bool), KEEP)
def test_one_at_a_time_is_all_at_once(found, kept):
    """Retaining after every save never loses what retaining at the end would have kept."""
    left: dict[int, float | None] = {}
    for step in sorted(found):
        left[step] = found[step]
        left = {s: left[s] for s in staying(left, kept)}
    assert left.keys() == staying(found, kept)


def test_of_a_run(place):
    """keep_last 2, the best, and multiples of 4; NaN is no quality."""
    qualities = {1: 0.2, 2: 0.9, 3: 0.4, 4: 0.9, 5: math.nan, 6: 0.5, 7: None, 8: 0.1, 9: 0.3}
    checkpoints = Checkpoints(place, keep(2, 1, 4))
    for step, quality in qualities.items():
        save(checkpoints, step, quality=quality)
        stay = staying({s: q for s, q in qualities.items() if s <= step}, keep(2, 1, 4))
        assert set(manifests.steps(place)) == stay
    assert manifests.steps(place) == [2, 4, 8, 9]
    assert step_restored(place) == 9


def test_quality_is_that_of_the_step(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), IN_STEP)
    save(checkpoints, 1, quality=0.5)
    save(checkpoints, 2)
    model, optimizer = odd()
    stale = {"reported": 2, "metrics": {"val/acc1": 0.9}}
    checkpoints.save(3, model, optimizer, images=0, progress=stale, config={})
    checkpoints.save(4, model, optimizer, images=0, progress={}, config={})
    assert [quality_of(str(tmp_path), step) for step in (1, 2, 3, 4, 5)] == [0.5, None, None, None, None]
    flip(folder(tmp_path, 1) / "manifest.json", 9)
    assert quality_of(str(tmp_path), 1) is None


def test_damaged_ones_push_out_no_whole_one(tmp_path):
    directory = str(saved(tmp_path, 1, 2, 3, 4))
    flip(folder(tmp_path, 3) / "manifest.json", 40)  # can be seen
    flip(next(folder(tmp_path, 4).glob("weights-*")), 40)  # cannot; but the run noticed
    retain(directory, 5, keep(2), passed_over={4})
    assert manifests.steps(directory) == [1, 2]


def test_later_ones_that_nobody_passed_over_stay(tmp_path):
    directory = str(saved(tmp_path, 1, 2, 3, 4))
    retain(directory, 2, keep(1))
    assert manifests.steps(directory) == [2, 3, 4]
    retain(directory, 2, keep(1), passed_over={3})
    assert manifests.steps(directory) == [2, 4]


def test_garbage(tmp_path, caplog):
    """Only what is named as we name things, and only what no manifest vouches for."""
    directory = saved(tmp_path / "checkpoints", 1, 2)
    ours = [
        "step-00000003.0123abcd.tmp/weights-00000.0123abcd.bin",
        "step-00000003.0123abcd.tmp/whatever",
        "step-00000002/weights-00000.0123abcd.bin",
        "step-00000002/optimizer.0123abcd.json",
        "step-00000002/manifest.json.0123456789abcdef0123456789abcdef.tmp",
        "step-00000004/weights-00000.0123abcd.bin",  # half removed
        "step-123456789/optimizer-00123.0123abcd.bin",
    ]
    foreign = [
        "notes.txt",
        "step-by-step/notes.txt",
        "step-5/weights-00000.0123abcd.bin",
        "step-00000002/notes.txt",
        "step-00000002/weights.bin",
        "step-00000006/mine",
        "step-00000007",
        "step-00000008.tmp/mine",
        "best",
        ".hidden",
    ]
    for name in [*ours, *foreign]:
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("content")
    before = sorted(p for p in directory.rglob("*") if p.is_file())
    collect_garbage(str(directory))
    assert before == sorted(
        [*(p for p in directory.rglob("*") if p.is_file()), *(directory / name for name in ours)]
    )
    assert not (directory / "step-00000004").exists()
    assert not (directory / "step-00000003.0123abcd.tmp").exists()
    assert len(said(caplog)) == 6
    assert step_restored(directory) == 2


def test_garbage_of_a_damaged_one_may_tell_why(tmp_path):
    directory = saved(tmp_path, 1, 2)
    stray = folder(directory, 2) / "weights-00000.0123abcd.bin"
    stray.write_text("content")
    (folder(directory, 2) / "manifest.json").write_text("{")
    collect_garbage(str(directory))
    assert stray.exists()
    assert step_restored(directory) == 1


def test_no_directory(tmp_path):
    collect_garbage(str(tmp_path / "nothing"))
    assert drop_optimizer(str(tmp_path / "nothing")) == 0
    (tmp_path / "file").write_text("")
    collect_garbage(str(tmp_path / "file"))


def test_drop_optimizer(place):
    saved(place, 1, 2)
    sizes = [manifests.read(manifests.folder_of(place, step)).size() for step in (1, 2)]
    freed = drop_optimizer(place)
    assert freed == sum(sizes) - 2 * manifests.read(manifests.folder_of(place, 1)).size() > 0
    for step in (1, 2):
        path = manifests.folder_of(place, step)
        manifest = manifests.read(path)
        assert not manifest.has_optimizer()
        assert manifests.damaged(path, manifest.files.items()) == []
        assert set(storage.names(path)) == {"manifest.json", *manifest.files}
        model, _ = odd()
        load(path, manifest, model)
        for name, tensor in model.state_dict().items():
            assert tensor.equal(expected(f"weights.{name}", step, tensor))
    assert drop_optimizer(place) == 0
    with pytest.raises(ValueError, match=r"step-00000002 holds weights only: training cannot go on from it"):
        Checkpoints(place, IN_STEP).restore(*odd())


def test_drop_optimizer_leaves_damaged_ones(tmp_path):
    saved(tmp_path, 1, 2)
    flip(folder(tmp_path, 2) / "manifest.json", 7)
    before = sorted(folder(tmp_path, 2).iterdir())
    assert drop_optimizer(str(tmp_path)) > 0
    assert sorted(folder(tmp_path, 2).iterdir()) == before


class Killed(BaseException):
    pass


def interrupted(work, number: int) -> bool:
    """Whether `work` was, at its storage operation of this number."""

    def meet(count: int, what: str) -> None:
        if count == number:
            raise Killed

    undo = counting(meet)
    try:
        work()
    except Killed:
        return True
    finally:
        undo()
    return False


def test_drop_optimizer_at_any_moment(tmp_path):
    """Interrupted before or after any of its operations: weights load, and doing it again completes it."""
    number = 0
    while True:
        number += 1
        directory = str(saved(tmp_path / str(number), 1, 2))
        was = interrupted(lambda directory=directory: drop_optimizer(directory), number)
        for step in (1, 2):
            path = manifests.folder_of(directory, step)
            manifest = manifests.read(path)
            assert manifests.damaged(path, manifest.files.items()) == []
            load(path, manifest, odd()[0])
        drop_optimizer(directory)
        for step in (1, 2):
            path = manifests.folder_of(directory, step)
            assert set(storage.names(path)) == {"manifest.json", *manifests.read(path).files}
        if not was:
            break
    assert number > 10


def test_removal_at_any_moment(tmp_path):
    """Half a removal is no checkpoint; the next start completes it."""
    number = 0
    while True:
        number += 1
        directory = saved(tmp_path / str(number), 1, 2, 3)
        was = interrupted(lambda directory=directory: retain(str(directory), 3, keep(1)), number)
        for step in manifests.steps(str(directory)):
            path = str(folder(directory, step))
            assert manifests.damaged(path, manifests.read(path).files.items()) == []
        assert step_restored(directory) == 3
        assert {path.name for path in Path(directory).iterdir()} == {
            f"step-{step:08d}" for step in manifests.steps(str(directory))
        }
        if not was:
            break
    assert number > 4


def test_a_manifest_that_cannot_be_rewritten(tmp_path, monkeypatch):
    """The disk is full: what was there stays whole."""
    saved(tmp_path, 1)

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(retention.storage, "flush", full)
    with pytest.raises(OSError, match="no space left"):
        drop_optimizer(str(tmp_path))
    monkeypatch.undo()
    assert step_restored(tmp_path) == 1
