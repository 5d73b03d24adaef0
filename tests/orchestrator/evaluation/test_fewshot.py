"""Few-shot figures and the probe of a trained model, from its checkpoint."""

import re

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.loader import in_process
from orchestrator.data.stream import in_order
from orchestrator.evaluation.fewshot import few_shot, probe, short_of_images
from orchestrator.evaluation.trained import Trained, read_trained
from orchestrator.fewshot import augmented
from orchestrator.recipe import FewShotConfig
from orchestrator.training.worker import checkpoint_directory, result_of, train_worker

CPU = torch.device("cpu")
CONFIG = FewShotConfig(shots=(1, 5), seeds=2)
SMALL = {
    "model.width": 16,
    "model.mlp_dim": 32,
    "model.moe.num_experts": 4,
    "train.lr": 5e-3,
    "train.steps": 30,
    "train.fewshot.shots": [1, 5],
    "train.fewshot.seeds": 2,
}


@pytest.fixture(scope="module")
def run(digits: str, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    home = str(tmp_path_factory.mktemp("home"))
    run = override(RunConfig(), {**SMALL, "data.path": digits, "storage": home})
    train_worker(run, report=lambda step, metrics: None, read=in_process)
    return run


@pytest.fixture
def trained(run: RunConfig) -> Trained:
    return read_trained(checkpoint_directory(run))


def test_a_checkpoint_has_the_figures_that_training_reported(run: RunConfig, trained: Trained) -> None:
    result = result_of(run)
    assert result is not None
    for name, figure in few_shot(trained, CONFIG, batch_size=50, device=CPU).metrics().items():
        assert figure == pytest.approx(result.metrics[name], abs=1e-9)


def test_weights_stay_as_they_are(trained: Trained, digits: str) -> None:
    model = trained.load()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    probe(model, trained.run, [digits], batch_size=64, device=CPU)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_probe_is_scikit_learns_ridge(trained: Trained, digits: str) -> None:
    """On the features of all 1,433 training images; of equal float64 numbers, one image may be a tie."""
    model = trained.load()
    found = probe(model, trained.run, [digits], batch_size=64, device=CPU)
    x, y = {}, {}
    for split in ("train", "val"):
        stream = in_order(override(trained.run, {"data.batch_size": 2000, "data.lanes": 1}), split)
        (batch,) = in_process(stream, stream.steps())
        whole = batch.valid > 0
        with torch.no_grad():
            x[split] = model.features(batch.image[whole].float() / 127.5 - 1)[0].double().numpy()
        y[split] = batch.label[whole].numpy()
    mean, scale = x["train"].mean(0), x["train"].std(0) + 1e-5
    ridge = Ridge(alpha=found.strength, fit_intercept=False, solver="svd")
    ridge.fit(augmented(x["train"], mean, scale), 2 * np.eye(10)[y["train"]] - 1)
    answers = ridge.predict(augmented(x["val"], mean, scale)).argmax(-1)
    (accuracy,) = found.accuracy.values()
    assert abs((answers == y["val"]).mean() - accuracy) <= 1.01 / len(answers)
    assert accuracy > few_shot(trained, CONFIG, batch_size=64, device=CPU).mean(5)


def test_it_says_which_classes_are_rare(trained: Trained, digits: str) -> None:
    assert short_of_images(trained.run, digits, (1, 25)) == ""
    text = short_of_images(trained.run, digits, (1, 145))
    assert re.fullmatch(
        r"\d of 10 classes have fewer than 145 training images, the rarest 1\d\d: all of theirs are used,"
        r" 14\d\d images in all",
        text,
    )
