"""Any layout loads what two or four workers save, and an error on one worker reaches all of them.

One launch runs all scenes, because importing torch takes longer than a scene. In most scenes a run is saved
at step 3 and trained for two more steps.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe.layout import local_part
from moe.parallel import set_weights
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.files import load_state
from orchestrator.checkpoint.manager import Checkpoints, NotFiniteError
from orchestrator.config import CheckpointConfig
from tests.moe.parity import TOLERANCE, spawn
from tests.orchestrator.checkpoint.counted import file_of, flip
from tests.orchestrator.checkpoint.operations import before_opening
from tests.orchestrator.checkpoint.small_runs import (
    DTYPES,
    RUNS,
    assert_same,
    built,
    one_rank,
    train,
    whole_state,
)

SOFT, MIXTURE, TOP_K, TOKEN_CHOICE, IN_BFLOAT16, ADAFACTOR = RUNS
RESHARDED = [  # run, saved, loaded; a layout costs seconds, because torch plans every operation on it
    (SOFT, "pairs", "pairs"),
    (SOFT, "pairs", "dp"),
    (SOFT, "plain", "pairs"),
    (MIXTURE, "pairs", "ep"),
    (TOP_K, "pairs", "ep"),
    (TOKEN_CHOICE, "pairs", "dp"),
    (IN_BFLOAT16, "pairs", "pairs"),
    (IN_BFLOAT16, "plain", "dp"),
    (ADAFACTOR, "pairs", "pairs"),
    (ADAFACTOR, "pairs", "dp"),
    (ADAFACTOR, "plain", "dp"),
]
LOADED_BY_ONE = [  # run, saved, loaded
    *((name, "pairs", "plain") for name in RUNS),
    (SOFT, "pairs", "one rank"),
    (MIXTURE, "copies", "plain"),
    (TOKEN_CHOICE, "plain", "one rank"),
]
IN_STEP = CheckpointConfig(asynchronous=False)
REPORT = {"images": 24, "progress": {"device_s": 1.5}, "config": {}}


def layout(name: str) -> dict[str, int]:
    """Returns how a model is split over all ranks; `plain` is not split."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    return {
        "pairs": {"ep": 2},
        "dp": {"ep": 1},
        "ep": {"ep": ranks},
        "copies": {"ep": ranks // 2, "dp_replicate": 2},
        "one rank": {"ep": 1},
        "plain": {},
    }[name]


def save_at_3(name: str, folder: Path, saved: str) -> None:
    """Makes a checkpoint, and beside it a file with the state and losses that a loaded run must reach."""
    model, optimizer = built(name, seed=0, **layout(saved))
    config = CheckpointConfig(asynchronous=saved == "pairs")
    checkpoints = Checkpoints(str(folder / saved / name), config)
    assert checkpoints.restore(model, optimizer) is None
    train(model, optimizer, range(3))
    checkpoints.save(3, model, optimizer, **REPORT)
    state = whole_state(model, optimizer)
    losses = train(model, optimizer, range(3, 5))  # while the checkpoint is written
    checkpoints.finish()
    assert checkpoints.failures == 0
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save((state, losses), folder / saved / f"{name}.expected")


def load_and_go_on(name: str, folder: Path, saved: str, loaded: str) -> None:
    model, optimizer = built(name, seed=None, **layout(loaded))
    manifest = Checkpoints(str(folder / saved / name), CheckpointConfig()).restore(model, optimizer)
    assert manifest
    assert (manifest.step, manifest.images, manifest.progress) == (3, 24, {"device_s": 1.5})
    state, losses = torch.load(folder / saved / f"{name}.expected")
    what = f"{name}, {saved} -> {loaded}"
    assert_same(whole_state(model, optimizer), state, what)
    if name == SOFT:
        assert all(value.any() for key, value in state.items() if "exp_avg" in key), what
    got = train(model, optimizer, range(3, 5))
    tolerance = 0 if saved == loaded else TOLERANCE[DTYPES[name]]
    for ours, theirs in zip(got, losses, strict=True):
        assert abs(ours - theirs) <= tolerance * theirs, f"{what}: {got}, expected {losses}"


def resharding(folder: Path) -> None:
    for name in RUNS:
        save_at_3(name, folder, "pairs")
    save_at_3(MIXTURE, folder, "copies")
    for name, saved, loaded in RESHARDED:
        if layout(saved) == layout(loaded) and name in (SOFT, TOP_K):
            continue  # other runs are loaded in the layout that they were saved in
        load_and_go_on(name, folder, saved, loaded)


def saving_beside_training(folder: Path) -> None:
    """With a save at every second step, on slow storage, losses are the same as without saving."""
    outcomes = []
    for saves in (False, True):
        model, optimizer = built(SOFT, seed=0, ep=2)
        checkpoints = Checkpoints(str(folder / "beside"), CheckpointConfig(keep_last=20))
        losses = []
        with before_opening(lambda _: time.sleep(0.02)):
            for step in range(10):
                losses += train(model, optimizer, range(step, step + 1))
                if saves and step % 2:
                    checkpoints.save(step + 1, model, optimizer, **REPORT)
            checkpoints.finish()
        outcomes.append((losses, whole_state(model, optimizer)))
        assert checkpoints.failures == 0
    assert outcomes[0][0] == outcomes[1][0]
    assert_same(outcomes[1][1], outcomes[0][1])
    assert manifests.steps(str(folder / "beside")) == list(range(2, 12, 2))


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collects what our packages log on this rank."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("orchestrator").addHandler(handler)
    yield lines
    logging.getLogger("orchestrator").removeHandler(handler)


def falling_back(folder: Path) -> None:
    """A byte is flipped in the share of one rank: all ranks use the same older step, and rank 0 logs it."""
    directory, name = folder / "fallback", MIXTURE
    model, optimizer = built(name, seed=0, ep=2)
    checkpoints = Checkpoints(str(directory), IN_STEP)
    states = {}
    for step in (1, 2):
        train(model, optimizer, range(step, step + 1))
        checkpoints.save(step, model, optimizer, **REPORT)
        states[step] = whole_state(model, optimizer)
    damaged = f"optimizer-{dist.get_world_size() - 1:05}-"
    if dist.get_rank() == 1:
        flip(file_of(directory / "step-00000002", damaged), 1000)
    dist.barrier()
    with logged() as lines:
        model, optimizer = built(name, seed=9, **layout("ep"))
        checkpoints = Checkpoints(str(directory), IN_STEP)
        manifest = checkpoints.restore(model, optimizer)
    assert manifest
    assert manifest.step == 1
    assert_same(whole_state(model, optimizer), states[1])
    assert len(lines) == (dist.get_rank() == 0)
    assert all(f"step-00000002 is damaged ({damaged}" in line for line in lines)
    train(model, optimizer, range(2, 3))
    checkpoints.save(2, model, optimizer, **REPORT)
    expected = whole_state(model, optimizer)
    again, its_optimizer = built(name, seed=9, ep=1)
    manifest = Checkpoints(str(directory), IN_STEP).restore(again, its_optimizer)
    assert manifest
    assert manifest.step == 2
    assert_same(whole_state(again, its_optimizer), expected)


def a_worker_that_cannot_write(folder: Path, *, asynchronous: bool) -> None:
    """All workers count the failure; the failed save leaves no files; the next save succeeds."""
    directory = folder / f"cannot write {asynchronous}"
    last = dist.get_world_size() - 1

    def refuse(location: str) -> None:
        if f"rank-{last:05}" in location:
            raise OSError("no space left for it")

    model, optimizer = built(SOFT, seed=0, ep=2)
    checkpoints = Checkpoints(str(directory), CheckpointConfig(asynchronous=asynchronous))
    train(model, optimizer, range(1))
    checkpoints.save(1, model, optimizer, **REPORT)
    checkpoints.settle()
    with logged() as lines, before_opening(refuse):
        checkpoints.save(2, model, optimizer, **REPORT)
        checkpoints.settle()
    assert checkpoints.failures == 1
    words = ["saving step 2", f"failed: worker {last}: OSError('no space left for it')"]
    assert len(lines) == (dist.get_rank() == 0)
    assert all(part in line for line in lines for part in words), lines
    dist.barrier()
    assert [path.name for path in directory.iterdir()] == ["step-00000001"]
    dist.barrier()
    checkpoints.save(3, model, optimizer, **REPORT)
    checkpoints.finish()
    assert checkpoints.failures == 1
    assert manifests.steps(str(directory)) == [1, 3]


def not_finite_on_one_worker(folder: Path) -> None:
    """No worker saves, and all say which tensor it is."""
    directory, (model, optimizer) = folder / "infinite", built(SOFT, seed=0, ep=2)
    checkpoints = Checkpoints(str(directory), CheckpointConfig())
    checkpoints.restore(model, optimizer)
    if dist.get_rank() == 1:
        local_part(model.blocks[-1].mlp.experts.w_in_EDF).flatten()[-1] = float("inf")
    with pytest.raises(NotFiniteError, match=r"experts.w_in_EDF hold numbers that are not finite"):
        checkpoints.save(1, model, optimizer, **REPORT)
    checkpoints.finish()
    assert not directory.exists()


def no_checkpoint_is_whole(folder: Path) -> None:
    """Weights that are drawn after the search are those of a new run, and its losses too."""
    directory, (model, optimizer) = folder / "none whole", built(SOFT, seed=0, ep=2)
    train(model, optimizer, range(1))
    Checkpoints(str(directory), IN_STEP).save(1, model, optimizer, **REPORT)
    if dist.get_rank() == 0:
        flip(file_of(directory / "step-00000001", "optimizer-00001-"), -1)
    dist.barrier()
    model, optimizer = built(SOFT, seed=None, ep=2)
    assert Checkpoints(str(directory), CheckpointConfig()).restore(model, optimizer) is None
    set_weights(model, 0)
    fresh, its_optimizer = built(SOFT, seed=0, ep=2)
    assert train(model, optimizer, range(2)) == train(fresh, its_optimizer, range(2))
    assert_same(whole_state(model, optimizer), whole_state(fresh, its_optimizer))


def a_worker_that_cannot_read(folder: Path) -> None:
    """All workers stop with the error: no older checkpoint is tried, and nothing is deleted."""
    directory, read = str(folder / "fallback"), storage.open_to_read
    before = sorted(folder.rglob("*"))

    def refuse(location: str):
        if dist.get_rank() == dist.get_world_size() - 1 and "weights-0000" in location:
            raise OSError("storage is away")
        return read(location)

    model, optimizer = built(MIXTURE, seed=9, ep=2)
    storage.open_to_read = refuse
    try:
        with pytest.raises(OSError, match="storage is away"):
            Checkpoints(directory, IN_STEP).restore(model, optimizer)
    finally:
        storage.open_to_read = read
    dist.barrier()
    assert sorted(folder.rglob("*")) == before


SCENES: list[Callable[[Path], None]] = [
    resharding,
    falling_back,
    partial(a_worker_that_cannot_write, asynchronous=True),
    a_worker_that_cannot_read,
    not_finite_on_one_worker,
    no_checkpoint_is_whole,
]
SCENES_OF_FOUR: list[Callable[[Path], None]] = [
    *SCENES,
    saving_beside_training,
    partial(a_worker_that_cannot_write, asynchronous=False),
]


def worker(rank: int, ranks: int, folder: str) -> None:
    for scene in SCENES_OF_FOUR if ranks == 4 else SCENES:
        scene(Path(folder))
        dist.barrier()


def half_of_them(rank: int, ranks: int, folder: str) -> None:
    for name, loaded in ((SOFT, "ep"), (MIXTURE, "dp")):
        load_and_go_on(name, Path(folder), "pairs", loaded)


RANKS = [pytest.param(2, marks=pytest.mark.smoke), pytest.param(4, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=RANKS, ids="{} workers".format)
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def launched(ranks: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    for name in (SOFT, TOKEN_CHOICE, IN_BFLOAT16, ADAFACTOR):
        save_at_3(name, folder, "plain")
    spawn(ranks, worker, str(folder), timeout_s=60)
    if ranks == 4:
        spawn(2, half_of_them, str(folder), timeout_s=60)
    return folder


@pytest.mark.parametrize(("name", "saved", "loaded"), LOADED_BY_ONE)
def test_one_process_continues_the_run_of_several(launched, name, saved, loaded):
    if loaded == "one rank":
        with one_rank():
            load_and_go_on(name, launched, saved, loaded)
    else:
        load_and_go_on(name, launched, saved, loaded)


def test_weights_and_shares(launched, ranks):
    """Weights load without the optimiser. Every rank wrote its share."""
    folder = str(launched / "pairs" / MIXTURE / "step-00000003")
    model, _ = built(MIXTURE, seed=9)
    load_state(folder, manifests.read(folder), model)
    expected, _ = torch.load(launched / "pairs" / f"{MIXTURE}.expected")
    assert_same(model.state_dict(), {name: expected[name] for name in model.state_dict()})
    for kind in ("weights", "optimizer"):
        files = (launched / "pairs" / SOFT / "step-00000003").glob(f"{kind}-*")
        sizes = [file.stat().st_size for file in files]
        assert len(sizes) == ranks
        assert max(sizes) < 1.5 * sum(sizes) / ranks
