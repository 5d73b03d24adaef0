"""One thread: sums do not depend on how they are split, and processes do not fight for two cores.

Large libraries are imported where they are used: the process that hands out the tests needs none of them.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import gc
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from _pytest.logging import LogCaptureHandler, caplog_handler_key, catching_logs
from xdist.remote import Producer
from xdist.scheduler.loadfile import LoadFileScheduling

from moe.guests import PACKAGES
from tests.lanes import absent_guests
from tests.parts import png, poison_memory, start_ray

if TYPE_CHECKING:
    from orchestrator.data.manifest import Manifest

ROOT = Path(__file__).parents[1]
pytest_plugins = ["tests.command_fixtures"]

# without a deadline, for the first example imports libraries; with many examples where time is no matter
hypothesis.settings.register_profile("few", max_examples=10, deadline=None)
hypothesis.settings.register_profile("many", max_examples=200, deadline=None)
hypothesis.settings.load_profile("many" if os.environ.get("MOE_FRONTIER_ALL_PARTS") else "few")


# What costs seconds to make -> how files that use it are known.
SHARED = {
    "cluster": r'\bcluster: None|usefixtures\("cluster"\)',
    "store": r"\b(tracking: Tracking|store: Store)\b",
    "clusters": r"[(,] ?undisturbed\b|\bmachines\(|\bSTOP_BUTTON\b",  # of many processes: one at a time
    "ranks": r"\bspawn\(|_train_as_one\(|train_on_ranks\(",  # the server that forks them
}


class OneRay(LoadFileScheduling):
    """Several processes: a file's tests stay in one, and so do all files that share something."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return shares(file) or file


@cache
def shares(file: str) -> str | None:
    text = (ROOT / file).read_text()
    return next((what for what, of in SHARED.items() if re.search(of, text)), None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> OneRay:
    return OneRay(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--plugin", action="append", metavar="FILE", help="a plugin, which must obey the laws too"
    )


def pytest_configure(config: pytest.Config) -> None:
    if files := config.getoption("plugin"):
        from orchestrator import load_plugins

        load_plugins(files)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begins with what is shared, which takes longest; the shared Ray ends before tests that start their own.
    Tests for a GPU skip where there is none, and those of guests are left out where a guest is absent.
    """
    import torch

    if absent_guests():
        of_guests = [item for item in items if item.get_closest_marker("guests")]
        config.hook.pytest_deselected(items=of_guests)
        items[:] = [item for item in items if item not in of_guests]

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs CUDA"))
    items.sort(
        key=lambda item: (
            [*SHARED, None].index(shares(item.nodeid.partition("::")[0])),
            "no_cluster" in getattr(item, "fixturenames", ()),
        )
    )


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """Ends the Ray of this process after the last test that needs it: an idle one takes a tenth of a core."""
    if "ray" in sys.modules and (not nextitem or shares(nextitem.nodeid.partition("::")[0]) != "cluster"):
        sys.modules["ray"].shutdown()


def pytest_collection_finish() -> None:
    """Garbage is not looked for in what was imported and collected, which takes a second each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def apart(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests share no home, cache, Ray or MLflow server with the user, or with tests that run beside them.

    Processes that they start inherit it.
    """
    for name in ("HOME", "CACHE"):
        os.environ[f"MOE_FRONTIER_{name}"] = str(tmp_path_factory.mktemp(name.lower()))
    os.environ["RAY_ADDRESS"] = "local"
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"  # eight processes for jobs of its LLM pages
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    # A disk that writes at once guards against a power cut, of which the simulated machine knows.
    os.fsync = lambda descriptor: None


@pytest.fixture(autouse=True)
def poisoned() -> None:
    """Begins a test on one thread, and fills memory that it does not set with NaN or the largest integer."""
    import torch

    poison_memory()
    torch.set_num_threads(1)


@pytest.fixture
def caplog(request: pytest.FixtureRequest) -> Iterator[pytest.LogCaptureFixture]:
    """Pytest's own, without its plugin, which at each phase of each test puts handlers on all loggers of all
    libraries: half the time of a small test."""
    with catching_logs(LogCaptureHandler()) as handler:
        request.node.stash[caplog_handler_key] = handler
        log = pytest.LogCaptureFixture(request.node, _ispytest=True)
        yield log
        log._finalize()


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled digits as shards; not to be written to."""
    from orchestrator.packing import open_source
    from orchestrator.packing.pack import write_shards

    path = str(tmp_path_factory.mktemp("digits") / "shards")
    source = open_source("digits")
    write_shards(path, source.classes, source.splits)
    return path


@pytest.fixture(scope="session")
def few_digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Some of the bundled digits as shards, for tests that evaluate often; not to be written to."""
    from orchestrator.packing import open_source
    from orchestrator.packing.pack import write_shards

    path = str(tmp_path_factory.mktemp("digits") / "few")
    source = open_source("digits")
    splits = {
        split: [*samples][: 400 if split == "train" else 60] for split, samples in source.splits.items()
    }
    write_shards(path, source.classes, splits)
    return path


@pytest.fixture(scope="session")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled digits with captions, as shards; not to be written to."""
    from orchestrator.packing import pack as packing

    return packing.digits(str(tmp_path_factory.mktemp("captioned")), "digits-captions")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], str]:
    """``empty_store(folder)``: puts an MLflow database without runs there, and returns its URI.

    A copy: making the tables takes more than a second.
    """
    from mlflow import MlflowClient

    made = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    MlflowClient(f"sqlite:///{made}").search_experiments()

    def put(folder: Path) -> str:
        folder.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{shutil.copy(made, folder / 'mlflow.db')}"

    return put


def touch_pictures(patch: pytest.MonkeyPatch) -> None:
    from orchestrator.frontier.frontier import Frontier

    def touch(_: Frontier, *paths: Path) -> None:
        for path in paths:
            path.touch()

    patch.setattr(Frontier, "save_picture", touch)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of frontiers are empty files: drawing one takes half a second."""
    touch_pictures(monkeypatch)


@pytest.fixture(scope="session")
def trained_home(
    digits: str, empty_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A storage with what `train_sweep` leaves, with empty pictures; not to be trained in."""
    from tests.trained_sweep import train_sweep

    home = tmp_path_factory.mktemp("trained")
    empty_store(home)
    with pytest.MonkeyPatch.context() as patch:
        touch_pictures(patch)
        train_sweep(home, digits)
    return home


@pytest.fixture
def pack_greys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Callable[..., tuple[str, Manifest]]":
    """``pack_greys(train=20, val=7)``: 8x8 images whose grey is their number, with its last digit as label.

    Shards are small, so that there are many. Validation images go on counting where training ends.
    """
    import numpy as np

    from orchestrator.packing import pack as packing

    def pack(*, train: int, val: int = 3, rows_per_shard: int = 4) -> "tuple[str, Manifest]":
        def samples(numbers: Sequence[int]) -> list[packing.Sample]:
            return [packing.Sample(png(np.full((8, 8), n)), n % 10, f"grey-{n}") for n in numbers]

        monkeypatch.setattr(packing, "ROWS_PER_SHARD", rows_per_shard)
        path = str(tmp_path / f"greys-{train}-{val}-{rows_per_shard}")
        splits = {"train": samples(range(train)), "val": samples(range(train, train + val))}
        return path, packing.write_shards(path, map(str, range(10)), splits)

    return pack


@pytest.fixture
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Keeps plugins in one test, and members that other tests define out of it. A call forgets plugins, as
    a new process would begin.
    """
    from orchestrator import RunConfig, plugins

    assert RunConfig.plugins == ()  # all families are there
    monkeypatch.setattr(plugins, "_texts", {})
    known = [(family, family.kinds) for family in plugins._families()]
    for family, kinds in known:
        ours = {kind: cls for kind, cls in kinds.items() if not cls.__module__.startswith("tests.")}
        monkeypatch.setattr(family, "kinds", ours)

    def forget() -> None:
        plugins._texts.clear()
        for name in [name for name in sys.modules if name.startswith("moe_plugin_")]:
            plugins._forget(name)

    yield forget
    # A module of the project that was imported meanwhile is not imported again.
    roots = ("moe", "orchestrator", *PACKAGES)
    for family, kinds in known:
        found = family.kinds.items()
        kinds.update({kind: cls for kind, cls in found if cls.__module__.split(".")[0] in roots})
    forget()


@pytest.fixture(scope="module")
def cluster() -> None:
    """A Ray of two CPUs. It is kept for the files that follow, for a start takes five seconds."""
    import ray

    if not ray.is_initialized():
        start_ray()


@pytest.fixture
def no_cluster() -> Iterator[None]:
    """For tests that start Rays of their own in this process."""
    import ray

    ray.shutdown()
    yield
    ray.shutdown()
