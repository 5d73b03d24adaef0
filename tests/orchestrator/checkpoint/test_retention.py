"""Which checkpoints stay: as a pure function, and on storage, whatever is damaged or interrupted."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.files import load_state
from orchestrator.checkpoint.manager import (
    Checkpoints,
    checkpoints_to_keep,
    collect_garbage,
    drop_optimizer,
    retain,
)
from orchestrator.config import CheckpointConfig
from tests.orchestrator.checkpoint.counted import (
    IN_STEP,
    expected,
    file_of,
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


BY_HAND = [  # steps with qualities, the config, the steps that stay
    ({30: None, 10: None, 20: None}, keep(2), {20, 30}),  # not the order of insertion
    ({10: 0.5, 20: 0.9, 30: 0.9, 40: None}, keep(1, 1), {20, 40}),  # the first of equal qualities
    ({10: math.nan, 20: 0.1, 30: None, 40: None}, keep(1, 1), {20, 40}),  # NaN is not the best
    ({10: 0.0, 20: None, 30: None}, keep(1, 1), {10, 30}),  # zero was measured
    ({100: None, 150: None, 200: None, 250: None}, keep(1, 0, 100), {100, 200, 250}),
    ({10: math.inf, 20: 0.1, 30: None}, keep(1, 1), {20, 30}),  # nor is what is not finite
]


def test_by_hand():
    for found, kept, stay in BY_HAND:
        assert checkpoints_to_keep(found, kept) == stay, (found, kept)


def test_where_training_was_cut():
    """At 25. Its checkpoint stays only while it is the newest."""
    found = {10: None, 20: None, 25: None}
    assert checkpoints_to_keep(found, keep(2), unscheduled={25}) == {20, 25}
    assert checkpoints_to_keep(found | {30: None}, keep(2, 1, 5), unscheduled={25}) == {10, 20, 30}


@given(FOUND, KEEP, st.integers(2, 5))
def test_laws(found, kept, divisor):
    unscheduled = {step for step in found if step % divisor == 0}
    stay = checkpoints_to_keep(found, kept, unscheduled)
    own = [step for step in sorted(found) if step not in unscheduled or step == max(found)]
    assert set(own[-kept.keep_last :]) <= stay <= found.keys()
    measured = {s: q for s, q in found.items() if s in own and q is not None and not math.isnan(q)}
    best = sorted(measured.values(), reverse=True)[: kept.keep_best]
    assert sorted((measured[s] for s in stay & measured.keys()), reverse=True)[: len(best)] == best
    multiples = {step for step in own if kept.keep_every and step % kept.keep_every == 0}
    assert multiples <= stay
    assert len(stay) <= kept.keep_last + kept.keep_best + len(multiples)
    # Retaining after every save never loses what retaining at the end would have kept.
    left: dict[int, float | None] = {}
    for step in sorted(found):
        left[step] = found[step]
        left = {s: left[s] for s in checkpoints_to_keep(left, kept, unscheduled)}
    assert left.keys() == stay
    # Where training was cut, nothing stays in the end that an undisturbed run would not have.
    assert checkpoints_to_keep({step: found[step] for step in own}, kept) == stay


def test_during_a_run(place):
    """Keeps the last 2, the best, and multiples of 4; NaN is not a quality."""
    qualities = {1: 0.2, 2: 0.9, 3: 0.4, 4: 0.9, 5: math.nan, 6: None, 7: 0.3}
    checkpoints = Checkpoints(place, keep(2, 1, 4))
    for step, quality in qualities.items():
        save(checkpoints, step, quality=quality)
        stay = checkpoints_to_keep({s: q for s, q in qualities.items() if s <= step}, keep(2, 1, 4))
        assert set(manifests.steps(place)) == stay
    assert manifests.steps(place) == [2, 4, 6, 7]
    assert step_restored(place) == 7


def test_the_end_of_a_run_removes_what_an_earlier_end_left(tmp_path, monkeypatch):
    """A process may be killed between its last save and the removal."""
    checkpoints = Checkpoints(str(tmp_path), keep(1))
    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, "_retain", lambda self: None)
        for step in (1, 2):
            save(checkpoints, step)
    again = Checkpoints(str(tmp_path), keep(1))
    again.restore(*odd())
    again.finish()
    assert manifests.steps(str(tmp_path)) == [2]


def test_quality_is_that_of_the_step(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), IN_STEP)
    save(checkpoints, 1, quality=0.5)
    save(checkpoints, 2)
    stale = {"reported": 2, "metrics": {"val/acc1": 0.9}}
    checkpoints.save(3, *odd(), images=0, progress=stale, config={})
    assert [manifests.quality_of(str(tmp_path), step) for step in (1, 2, 3, 4)] == [0.5, None, None, None]
    flip(folder(tmp_path, 1) / "manifest.json", 9)
    assert manifests.quality_of(str(tmp_path), 1) is None


def test_damaged_and_later_checkpoints(tmp_path):
    """Damaged checkpoints push out no whole one; later checkpoints stay, unless the run skipped them."""
    directory = str(saved(tmp_path / "damaged", 1, 2, 3, 4))
    flip(folder(directory, 3) / "manifest.json", 40)  # visible without hashing
    flip(file_of(folder(directory, 4), "weights"), 40)  # noticed by the run alone
    retain(directory, 5, keep(2), skipped={4})
    assert manifests.steps(directory) == [1, 2]
    directory = str(saved(tmp_path / "later", 1, 2, 3, 4))
    retain(directory, 2, keep(1))
    assert manifests.steps(directory) == [2, 3, 4]
    retain(directory, 2, keep(1), skipped={3})
    assert manifests.steps(directory) == [2, 4]


def test_garbage(tmp_path, caplog):
    """Only files with our names go, and only those that no manifest lists."""
    directory = saved(tmp_path / "checkpoints", 1, 2)
    weights = "weights-00000-001.0123abcd.safetensors"
    ours = [
        f"step-00000003.0123abcd.tmp/{weights}",
        "step-00000003.0123abcd.tmp/whatever",
        f"step-00000002/{weights}",
        "step-00000002/manifest.json.0123456789abcdef0123456789abcdef.tmp",
        f"step-00000004/{weights}",  # half removed
        "step-123456789/optimizer-00123-1000.0123abcd.safetensors",
    ]
    foreign = [
        "notes.txt",
        f"step-5/{weights}",
        "step-00000002/notes.txt",
        "step-00000002/weights.safetensors",
        "step-00000006/mine",
        "step-00000007",
        "step-00000008.tmp/mine",
    ]
    for name in [*ours, *foreign]:
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("content")
    before = {p for p in directory.rglob("*") if p.is_file()}
    collect_garbage(str(directory))
    assert before - {p for p in directory.rglob("*") if p.is_file()} == {directory / name for name in ours}
    assert not (directory / "step-00000004").exists()
    assert not (directory / "step-00000003.0123abcd.tmp").exists()
    assert len(said(caplog)) == 5
    stray = folder(directory, 2) / weights
    stray.write_text("content")
    (folder(directory, 2) / "manifest.json").write_text("{")  # what it lists is unknown
    collect_garbage(str(directory))
    assert stray.exists()
    assert step_restored(directory) == 1


def check_whole(directory: str, *, weights_only: bool = False) -> None:
    """Checks that all checkpoints are whole, and that their weights load."""
    for step in manifests.steps(directory):
        path = manifests.folder_of(directory, step)
        manifest = manifests.read(path)
        assert manifests.list_damaged(path, manifest.files.items()) == []
        model, _ = odd()
        load_state(path, manifest, model)
        assert all(t.equal(expected(name, step, t)) for name, t in model.state_dict().items())
        if weights_only:
            assert set(storage.names(path)) == {"manifest.json", *manifest.weights()}


def test_drop_optimizer(place):
    saved(place, 1, 2)
    sizes = [manifests.read(manifests.folder_of(place, step)).size() for step in (1, 2)]
    freed = drop_optimizer(place)
    assert freed == sum(sizes) - 2 * manifests.read(manifests.folder_of(place, 1)).size() > 0
    check_whole(place, weights_only=True)
    assert drop_optimizer(place) == drop_optimizer(f"{place}/nothing") == 0
    with pytest.raises(ValueError, match="step-00000002 holds weights only: training cannot continue"):
        Checkpoints(place, IN_STEP).restore(*odd())


def test_drop_optimizer_leaves_damaged_checkpoints(tmp_path):
    saved(tmp_path, 1, 2)
    flip(folder(tmp_path, 2) / "manifest.json", 7)
    before = sorted(folder(tmp_path, 2).iterdir())
    assert drop_optimizer(str(tmp_path)) > 0
    assert sorted(folder(tmp_path, 2).iterdir()) == before


class Killed(BaseException):
    pass


def interrupted(work: Callable[[], object], number: int) -> bool:
    """Returns whether `work` was interrupted, at its storage operation of this number."""

    def meet(count: int, _: str) -> None:
        if count == number:
            raise Killed

    try:
        with counting(meet):
            work()
    except Killed:
        return True
    return False


def test_drop_optimizer_at_any_moment(tmp_path):
    """After an interruption at any operation weights load, and a second call completes the removal."""
    number, was = 0, True
    while was:
        number += 1
        directory = str(saved(tmp_path / str(number), 1, 2))
        was = interrupted(lambda directory=directory: drop_optimizer(directory), number)
        check_whole(directory)
        drop_optimizer(directory)
        check_whole(directory, weights_only=True)
    assert number > 10


def test_removal_at_any_moment(tmp_path):
    """Half a removal is not a checkpoint; the next start completes it."""
    number, was = 0, True
    while was:
        number += 1
        directory = saved(tmp_path / str(number), 1, 2, 3)
        was = interrupted(lambda directory=directory: retain(str(directory), 3, keep(1)), number)
        check_whole(str(directory))
        assert step_restored(directory) == 3
        steps = manifests.steps(str(directory))
        assert {path.name for path in Path(directory).iterdir()} == {f"step-{step:08d}" for step in steps}
    assert number > 4
