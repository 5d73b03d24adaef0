"""Heads that start from a model of other classes, or of the same ones in another order."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe.models.vit import ViT
from moe.parallel import build_sharded, make_mesh
from orchestrator.checkpoint.export import write_export
from orchestrator.checkpoint.files import OPTIMIZER
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.checkpoint.models import classes_at_start
from orchestrator.checkpoint.start import Classes, StartReport, load_moments, start_from
from orchestrator.codec import override, to_dict
from orchestrator.config import CheckpointConfig, RunConfig
from orchestrator.data.manifest import Manifest, Shard, save_manifest
from orchestrator.errors import UsageError
from orchestrator.training.fit import check_start
from tests.moe.parity import spawn
from tests.orchestrator.checkpoint.small_runs import train, whole_state

THERE = tuple("abcdefghij")
RUN = override(RunConfig(), {"model.width": 16, "model.mlp_dim": 32, "model.head_bias": -3.0})
STATE = f"{OPTIMIZER}state."
# names here -> the row there of each output here; None: a new one
CASES = {
    "the same": (THERE, (*range(10),)),
    "other order": (THERE[::-1], (*range(9, -1, -1),)),
    "some": (("x", "b", "y", "a"), (None, 1, None, 0)),
    "more": ((*THERE, "k"), (*range(10), None)),
    "none": (("x", "y", "z"), (None,) * 3),
    "twice": (("a", "a", "c"), (None, None, 2)),
}


def data_of(folder: Path, names: tuple[str, ...]) -> str:
    """Writes a manifest of these classes, without images."""
    shards = {split: (Shard(path="0", rows=9, bytes=1, sha256="a"),) for split in ("train", "val")}
    folder.mkdir(parents=True, exist_ok=True)
    save_manifest(
        str(folder), Manifest(classes=names, splits=shards, index={"train": "a", "val": "a"}, val_majority=1)
    )
    return str(folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, dict[str, Tensor]]:
    """A model of `THERE` after three steps, and its whole state."""
    folder = tmp_path_factory.mktemp("source")
    run = override(RUN, {"data.path": data_of(folder / "data", THERE), "train.init_from": f"{folder}/there"})
    model = ViT(run.model, seed=1)
    optimizer = run.train.optimizer.build(model)
    train(model, optimizer, range(3))
    checkpoints = Checkpoints(f"{folder}/there", CheckpointConfig(asynchronous=False))
    checkpoints.save(3, model, optimizer, images=24, progress={}, config=to_dict(run))
    checkpoints.finish()
    return run, whole_state(model, optimizer)


def on(run: RunConfig, folder: Path, names: tuple[str, ...]) -> RunConfig:
    return override(run, {"data.path": data_of(folder, names), "model.num_classes": len(names)})


def begun(run: RunConfig) -> tuple[ViT, dict[str, Tensor], StartReport]:
    """The model of a run and its whole state after its start with the optimiser's state, and the report."""
    model = ViT(run.model, seed=9)
    optimizer = run.train.optimizer.build(model)
    location = run.train.init_from or ""
    report = start_from(model, location, without=run.train.init_without, classes=classes_at_start(run))
    load_moments(model, optimizer, report)
    return model, whole_state(model, optimizer), report


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_the_class_of_the_same_name(
    case: str, source: tuple[RunConfig, dict[str, Tensor]], tmp_path: Path
) -> None:
    """Row by row: weights, biases and the optimiser's moments. New rows are as the seed, or zero moments."""
    (run, there), (names, rows) = source, CASES[case]
    run = on(run, tmp_path / "data", names)
    _, here, report = begun(run)
    fresh = ViT(run.model, seed=9).state_dict()
    for part in ("head.weight", "head.bias"):
        for name in (part, *(f"{STATE}{part}.{kind}" for kind in ("exp_avg", "exp_avg_sq"))):
            assert there[name].any()
            for output, row in enumerate(rows):
                new = fresh[name][output] if name in fresh else torch.zeros_like(here[name][output])
                assert torch.equal(here[name][output], new if row is None else there[name][row]), name
    assert torch.equal(here["embed.weight"], there["embed.weight"])
    assert {
        "the same": "the same 10 classes",
        "other order": "by the names of classes: 10 (j, i, h, ..), which have another order there",
        "some": "by the names of classes: 2 (b, a); new: 2 (x, y)",
        "more": "by the names of classes: 10 (a, b, c, ..); new: 1 (k)",
        "none": "a new head: its classes are 3 (x, y, z), and those of the weights 10 (a, b, c, ..)",
        "twice": "by the names of classes: 1 (c); new: 2 (a, a)",
    }[case] in str(report)


def _start_sharded(rank: int, ranks: int, folder: str) -> None:
    run = override(RUN, {"model.num_classes": 4})
    model = build_sharded(run.model, make_mesh("cpu", ep=1), seed=9)
    optimizer, group = run.train.optimizer.build(model), dist.new_group(backend="gloo")
    classes = Classes(here=CASES["some"][0], there=THERE)
    load_moments(model, optimizer, start_from(model, folder, classes=classes, group=group), group)
    here, whole = whole_state(model, optimizer), torch.load(f"{folder}/../expected.pt")
    assert all(torch.equal(here[name], tensor) for name, tensor in whole.items())


def test_sharded_heads_have_the_same_rows(
    source: tuple[RunConfig, dict[str, Tensor]], tmp_path: Path
) -> None:
    run = on(source[0], tmp_path, CASES["some"][0])
    place = run.train.init_from or ""
    torch.save(begun(run)[1], f"{place}/../expected.pt")
    spawn(2, _start_sharded, place, timeout_s=60)


def test_names_that_are_unknown_compare_by_number(
    source: tuple[RunConfig, dict[str, Tensor]], tmp_path: Path
) -> None:
    """As before, and it is said. Excluded heads are not compared at all."""
    run, there = source
    write_export(
        f"{tmp_path}/nameless",
        {n: t for n, t in there.items() if OPTIMIZER not in n},
        override(run, {"data.path": "/gone"}),
        classes=None,
        more={},
    )
    run = override(
        on(run, tmp_path / "data", THERE[::-1]), {"train.init_from": f"{tmp_path}/nameless/model.safetensors"}
    )
    model = ViT(run.model)
    report = start_from(model, run.train.init_from or "", classes=classes_at_start(run))
    assert torch.equal(model.head.weight, there["head.weight"])
    assert "of these weights are unknown: outputs are taken over by number" in str(report)
    assert report.classes
    assert not report.classes.are_same
    report = start_from(model, run.train.init_from or "", without="head", classes=classes_at_start(run))
    assert report.classes is None
    assert "classes" not in str(report)


def test_a_new_head_is_not_frozen(source: tuple[RunConfig, dict[str, Tensor]], tmp_path: Path) -> None:
    frozen = override(source[0], {"train.freeze": ("head.",), "storage": str(tmp_path)})
    check_start(frozen)
    with pytest.raises(
        UsageError, match=r"would keep head\.weight of a new head: its classes are 3 \(x, y, z\)"
    ):
        check_start(on(frozen, tmp_path / "data", CASES["none"][0]))
