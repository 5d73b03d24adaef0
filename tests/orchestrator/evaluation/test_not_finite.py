"""One law: of a model whose outputs are not finite, nothing that answers gives a number or a class."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
import torch
from mlflow.exceptions import MlflowException

from moe.overrides import AS_TRAINED
from orchestrator.checkpoint.models import ModelRef, read_model
from orchestrator.checkpoint.weights import read_metadata, write_file
from orchestrator.config import FewShotConfig
from orchestrator.data.batch import Batch
from orchestrator.data.images import Transform
from orchestrator.errors import UsageError
from orchestrator.evaluation import evaluate, scores
from orchestrator.evaluation.predict import NOT_FINITE, Predictor, list_parts
from orchestrator.evaluation.soup import quality_of_average
from orchestrator.tasks.base import not_finite
from orchestrator.tracking.served import ImageClassifier
from orchestrator.training.fewshot import few_shots
from orchestrator.training.loop import evaluate as validation
from tests.orchestrator.evaluation.exported import SOFT, exported
from tests.parts import png


def predicted(model: ModelRef, data: str, **settings: Any) -> None:
    """Raises UsageError if every row says so, and holds nothing else."""
    predictor = Predictor(model, AS_TRAINED, data, 32, None, **settings)
    _, parts = list_parts(data, "val", group=1)
    for row in predictor(pa.Table.from_pylist(parts)).to_pylist():
        assert {name for name, value in row.items() if value is not None} == {"key", "part", "error"}
        assert row["error"] == NOT_FINITE
    raise UsageError(NOT_FINITE)


def images(model: ModelRef, data: str, **fields: Any) -> Any:
    return evaluate.images_of(model, path=data, split="val", batch_size=64, **fields)


def served(model: ModelRef, data: str) -> None:
    one = ImageClassifier.__new__(ImageClassifier)
    one.model, one.device, one.signature = model.load(), torch.device("cpu"), model.signature
    one.threads = torch.get_num_threads()
    one.preparation, one.transform = model.preparation, Transform.of(model.signature)
    one.predict(pd.DataFrame({"image": [png(torch.zeros(8, 8, 3).numpy())]}))


def validated(model: ModelRef, data: str) -> None:
    """As a training reports it."""
    found = validation(model.load(), images(model, data), model.run_on(data, batch_size=64))
    lost = found.pop("val/not_finite")
    assert all(value != value for name, value in found.items() if name.startswith("val/")), found
    scores.refuse_not_finite(int(lost), 60)


def task_of(model: ModelRef, data: str, results: str = "") -> evaluate.EvalTask:
    return evaluate.EvalTask(
        model=model, points=(AS_TRAINED,), path=data, split="val", batch_size=64, results=results
    )


def figures(model: ModelRef, data: str) -> None:
    task_of(model, data).on_model(evaluate.figures, repeats=1)


def shots(model: ModelRef, data: str) -> None:
    run = model.run_on(data, batch_size=64)
    few_shots(model.load(), run, FewShotConfig(shots=(1,), seeds=1))


Entry = Callable[[ModelRef, str], Any]
CLASSIFIER: dict[str, Entry] = {
    "predict": predicted,
    "predict --features": partial(predicted, features=True),
    "evaluate": figures,
    "evaluate --shots": shots,
    "soup --greedy": lambda model, data: quality_of_average([model], images(model, data)),
    "pyfunc": served,
    "validation": validated,
}


def damaged(model: ModelRef, tensor: str) -> ModelRef:
    """The model with a number that is none."""
    weights = dict(model.load().state_dict())
    weights[tensor] = weights[tensor].clone()
    weights[tensor].view(-1)[0] = float("nan")
    write_file(model.location, weights, read_metadata(model.location))
    return read_model(model.location)


@pytest.fixture
def classifier(tmp_path: Path) -> ModelRef:
    return exported(tmp_path / "model.safetensors", SOFT)


@pytest.mark.parametrize("entry", CLASSIFIER)
def test_a_classifier_answers_nothing(entry: str, classifier: ModelRef, few_digits: str) -> None:
    with pytest.raises((UsageError, MlflowException), match="not finite"):
        CLASSIFIER[entry](damaged(classifier, "norm.weight"), few_digits)


def test_a_grid_has_no_points(classifier: ModelRef, few_digits: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not finite for 60 of 60 images"):
        evaluate._rows(task_of(damaged(classifier, "head.bias"), few_digits, str(tmp_path / "results")))
    assert not (tmp_path / "results").exists()


def test_what_counts_as_not_finite_by_hand() -> None:
    """Samples 1 and 2 have such outputs, of any shape; sample 3 is padding. What is computed once is an
    output of all samples; and a model may have no heads.
    """
    nan, place = float("nan"), torch.arange(4)
    batch = Batch(fields={}, valid=torch.tensor([1.0, 1, 1, 0]), key=place, sample=place)
    heads = {"a": torch.tensor([0, nan, 0, nan]), "b": torch.zeros(4, 2, 3)}
    heads["b"][2, 1, 2] = float("inf")
    assert not_finite(heads, batch) == 2
    assert not_finite({}, batch) == 0
    assert not_finite(heads, batch, {"classes": torch.tensor([[0.0], [nan]])}) == 3
