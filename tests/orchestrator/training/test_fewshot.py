"""Few-shot figures: scikit-learn's, on one worker and on two. `tests.golden` has those of the authors."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from moe.models.vit import ViT
from orchestrator.codec import override
from orchestrator.config import FewShotConfig, RunConfig
from orchestrator.data.stream import in_order, in_process
from orchestrator.errors import UsageError
from orchestrator.packing.pack import Sample, write_shards
from orchestrator.planning.preflight import check_metrics
from orchestrator.runs.run_directory import RunDir
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training import fewshot
from orchestrator.training.fewshot import (
    BIAS,
    STRENGTHS,
    FewShot,
    FewShotResult,
    accuracies,
    augmented,
    best_strength,
    choose_shots,
    fit_ridge,
    frozen_features,
    rare_classes,
    short_names,
)
from orchestrator.training.worker import train_worker
from tests.orchestrator.as_one import train_on_ranks
from tests.parts import png

GOLDEN = Path(__file__).parents[2] / "goldens" / "fewshot__ridge.npz"
CLASSES = 5
CPU = torch.device("cpu")
SMALL = {
    "model.width": 16,
    "model.mlp_dim": 32,
    "model.moe.num_experts": 4,
    "model.moe.images_per_group": 4,  # so that a group that is another would show
    "data.batch_size": 48,
    "train.lr": 5e-3,
    "train.steps": 12,
    "train.eval_every": 12,
    "train.fewshot.shots": [1, 5],
    "train.fewshot.seeds": 2,
}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return {name: file[name] for name in file.files}


@pytest.mark.parametrize("images", [10, 60], ids=["kernel", "Gram matrix"])
def test_it_is_scikit_learns_ridge(golden: dict[str, np.ndarray], images: int) -> None:
    """On the standardised matrix with its bias column, no intercept: weights to 1e-4 of the largest."""
    x, y = golden["x_train"][:images].astype(float), golden["y_train"][:images]
    whole = augmented(x, x.mean(0), x.std(0) + 1e-5)
    assert (whole[:, -1] == BIAS).all()
    targets = np.where(y[:, None] == np.arange(CLASSES), 1.0, -1.0)
    ridge = fit_ridge(x, y, CLASSES)
    for strength in (2.0**-10, 1.0, 2.0**19):
        theirs = Ridge(alpha=strength, fit_intercept=False, solver="svd").fit(whole, targets).coef_.T
        np.testing.assert_allclose(ridge.weights(strength), theirs, rtol=0, atol=1e-4 * abs(theirs).max())


def test_constant_features_and_a_single_image_are_finite() -> None:
    ridge = fit_ridge(np.ones((1, 3), np.float32), np.array([0]), 2)
    assert np.isfinite(ridge.weights(STRENGTHS[0])).all()
    assert (ridge.answers(np.ones((2, 3), np.float32)) == 0).all()


def test_a_class_with_fewer_images_gives_all_of_them() -> None:
    """Class 0 has one image, class 1 four: of 3 shots, 1 + 3."""
    labels = np.array([1, 0, 1, 1, 1])
    chosen = choose_shots(labels, shots=3, seed=0)
    assert labels[chosen].tolist() == [0, 1, 1, 1]
    assert len(set(chosen)) == 4


def test_the_strength_has_the_best_mean_rank_over_data_sets() -> None:
    """Ranks 1 2 3, 3 2 1, 1 3 2: sums 5, 7, 6. By mean accuracy the first would win."""
    by_data = np.array([[0.1, 0.2, 0.3], [0.9, 0.2, 0.1], [0.1, 0.3, 0.2]])
    assert by_data.mean(0).argmax() == 0
    assert best_strength(by_data) == 1


@pytest.fixture
def run(digits: str, tmp_path: Path) -> RunConfig:
    return override(RunConfig(), {**SMALL, "data.path": digits, "storage": str(tmp_path)})


@pytest.mark.smoke
def test_two_workers_report_what_one_does(run: RunConfig, tmp_path: Path) -> None:
    """FSDP and expert parallelism; the figures are of 364 validation images, so equal to 1/364 is equal."""
    as_worker_of_one = override(run, {"name": "one"})
    train_worker(as_worker_of_one, report=lambda step, metrics: None, read=in_process)
    two = override(run, {"name": "two", "scale.workers": 2, "scale.ep": 2})
    train_on_ranks(two, tmp_path)
    alone, together = RunDir.of(as_worker_of_one).result(), RunDir.of(two).result()
    assert alone is not None
    assert together is not None
    figures = {name for name in alone.metrics if name.startswith("fewshot/")}
    assert figures == {"fewshot/acc_1shot", "fewshot/acc_5shot"}
    for name in (*figures, "val/acc1"):
        assert together.metrics[name] == pytest.approx(alone.metrics[name], abs=1e-9), name
    assert alone.metrics["fewshot/acc_5shot"] > 0.2  # chance is 0.1


def test_figures_by_the_definition(run: RunConfig) -> None:
    """Features of all images by the model's own `features`, in batches of 48 as training has them; the shots
    are then taken from them by their labels.
    """
    run = override(run, {"model.moe.images_per_group": 1})  # else features depend on the neighbours
    model = ViT(run.model, seed=3).train()
    result = FewShot(run, FewShotConfig(shots=(5,), seeds=2)).measure(model, CPU)
    assert model.training
    train, test = (frozen_features(model, in_order(run, split), CPU) for split in ("train", "val"))
    batch = next(iter(in_process(in_order(run, "train"), range(1))))
    with torch.no_grad():
        ours = model.eval().features(batch["image"].float() / 127.5 - 1)
    np.testing.assert_allclose(train.x[: len(ours)], ours.numpy(), atol=1e-6)
    each = [accuracies(train, test, choose_shots(train.label, shots=5, seed=seed)) for seed in range(2)]
    best = STRENGTHS.index(result.strength[5])
    assert result.accuracy["shards", 5] == pytest.approx([one[best] for one in each], abs=1e-9)
    assert result.mean(5) == pytest.approx(np.mean(each, axis=0).max(), abs=1e-9)


def test_only_the_chosen_images_are_read(run: RunConfig) -> None:
    """10 classes x 5 shots x 2 seeds: 100 images at most, of 1433."""
    (chosen,) = FewShot(run, FewShotConfig(shots=(1, 5), seeds=2)).sets.values()
    assert 50 < chosen.train.epoch() <= 100
    batches = list(in_process(chosen.train, chosen.train.steps()))
    everything = in_order(run, "train")
    expected = [
        everything.read(index // 48, range(index % 48, index % 48 + 1)) for index in chosen.train.indices
    ]
    labels = torch.cat([batch["label"][:, 0][batch.valid > 0] for batch in batches])
    assert labels.tolist() == [int(piece.fields["label"][0, 0]) for piece in expected]
    images = torch.cat([batch["image"][batch.valid > 0] for batch in batches])
    assert torch.equal(
        images, torch.cat([torch.from_numpy(p.fields["image"]).permute(0, 3, 1, 2) for p in expected])
    )


def test_images_become_squares(run: RunConfig, tmp_path: Path) -> None:
    """The run's own evaluation would see the middle third alone."""
    stripes = np.repeat([[0] * 8 + [200] * 8 + [0] * 8], 8, axis=0)
    path = str(tmp_path / "wide")
    samples = [Sample(png(stripes), 0, str(n)) for n in range(2)]
    write_shards(path, ["stripes"], {"train": samples[:1], "val": samples[1:]})
    run = override(run, {"data.path": path, "data.eval_crop": 1.0})
    (shots,) = FewShot(run, FewShotConfig(shots=(1,), seeds=1)).sets.values()
    for stream in (shots.train, shots.test):
        image = next(in_process(stream, range(1)))["image"][0]
        assert image[:, :, [0, 4, 7]].unique(dim=1).flatten().tolist() == [0, 200, 0] * 3
    assert next(in_process(in_order(run, "val"), range(1)))["image"][0].unique().tolist() == [200]


def test_one_strength_for_several_data_sets(run: RunConfig, digits: str, tmp_path: Path) -> None:
    inverted = str(tmp_path / "inverted")
    write_inverted(digits, inverted)
    few = FewShot(run, FewShotConfig(paths=(digits, inverted), shots=(5,), seeds=1))
    result = few.measure(ViT(run.model), CPU)
    assert result.names() == ["shards", "inverted"]
    mean = sum(result.mean(5, name) for name in result.names()) / 2
    assert result.metrics() == {"fewshot/acc_5shot": pytest.approx(mean)}


def test_images_that_cannot_be_decoded_are_left_out(run: RunConfig, tmp_path: Path) -> None:
    """Ten classes of four training images, one of them broken in each: with four shots, three are left.

    The figures are those of data sets that hold only the decoded images among the shots.
    """
    good = [Sample(png(np.full((8, 8), 20 * n + i)), n, f"{n}-{i}") for n in range(10) for i in range(3)]
    bad = [Sample(b"no image", n, f"bad-{n}") for n in range(10)]
    run = override(run, {"model.moe.images_per_group": 1})  # else features depend on the neighbours
    model = ViT(run.model)

    def measured(name: str, train: list[Sample], test: list[Sample], *shots: int) -> FewShotResult:
        path = str(tmp_path / name)
        manifest = write_shards(path, map(str, range(10)), {"train": train, "val": test})
        assert manifest.rows("train") == len(train)
        few = FewShot(override(run, {"data.path": path}), FewShotConfig(shots=shots, seeds=1))
        return few.measure(model, CPU)

    everything = bad + good
    broken = measured("broken", everything, good + bad, 2, 4)
    for shots in (2, 4):
        drawn = choose_shots(np.array([sample.label for sample in everything]), shots=shots, seed=0)
        decoded = [everything[i] for i in drawn if everything[i] in good]
        clean = measured(f"clean{shots}", decoded, good, 4)
        assert broken.mean(shots) == pytest.approx(clean.mean(4), abs=1e-9)


def test_a_model_that_diverged_has_no_figure(run: RunConfig) -> None:
    model = ViT(run.model)
    torch.nn.init.constant_(model.norm.weight, float("nan"))
    result = FewShot(run, FewShotConfig(shots=(1,), seeds=1)).measure(model, CPU)
    assert np.isnan(result.metrics()["fewshot/acc_1shot"])


def test_what_a_sweep_may_maximise_and_what_a_config_refuses(run: RunConfig) -> None:
    check_metrics(Sweep(base=run, arms={}, quality="fewshot/acc_5shot"))
    for refused in (override(run, {"train.fewshot": None}), override(run, {"train.fewshot.shots": [1]})):
        with pytest.raises(UsageError, match=r"quality='fewshot/acc_5shot'"):
            check_metrics(Sweep(base=refused, arms={}, quality="fewshot/acc_5shot"))
    for shots in ([], [0], [1, 1]):
        with pytest.raises(UsageError, match=r"shots must be different numbers from 1"):
            override(run, {"train.fewshot.shots": shots})


def test_rare_classes_are_named(run: RunConfig) -> None:
    assert rare_classes(run, 25) == ""
    assert re.fullmatch(
        r"\d of 10 classes have fewer than 145 training images, the rarest 1\d\d: all images of these classes"
        r" are used, 14\d\d images in all",
        rare_classes(run, 145),
    )


def test_names_tell_paths_apart() -> None:
    assert list(short_names(["/a/pets", "s3://b/flowers/"])) == ["pets", "flowers"]
    assert list(short_names(["/a/x/shards", "/a/y/shards", "/z"])) == ["x-shards", "y-shards", "z"]
    assert short_names(["/a/pets", "/a/pets/"]) == {"pets": "/a/pets"}


def write_inverted(path: str, to: str) -> None:
    run = override(RunConfig(), {"data.path": path})
    splits = {}
    for split in ("train", "val"):
        (batch,) = in_process(in_order(override(run, {"data.batch_size": 64}), split), range(1))
        images = 255 - batch["image"].permute(0, 2, 3, 1).numpy()
        splits[split] = [
            Sample(png(i), int(n), f"{split}{k}")
            for k, (i, n) in enumerate(zip(images, batch["label"][:, 0], strict=True))
        ]
    write_shards(to, map(str, range(10)), splits)


def test_a_class_without_training_images_is_not_rare(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fewshot, "all_labels", lambda stream: np.array([0, 0, 2]))
    found = rare_classes(run, 2)
    assert found.startswith("1 of 2 classes have fewer than 2 training images, the rarest 1:")
