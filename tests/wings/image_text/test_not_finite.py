"""Two towers whose outputs are not finite give no number and no class, by any command."""

import json
from functools import partial
from pathlib import Path

import pytest

from orchestrator.checkpoint.models import read_model
from orchestrator.checkpoint.weights import write_file
from orchestrator.codec import to_dict
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from tests.orchestrator.evaluation.test_not_finite import (
    Entry,
    damaged,
    figures,
    images,
    predicted,
    validated,
)
from tests.wings.image_text.test_contrastive import WORDS, small_run
from wings.image_text import evaluation as image_text

TEN = (*WORDS.vocabulary.split(), "zero one")
NAMES = image_text.ClassNames(classes=TEN, templates=("a photo of {}",))
TOWERS: dict[str, Entry] = {
    "predict --classes": partial(predicted, names=NAMES),
    "evaluate": figures,
    "evaluate --zero-shot": lambda model, data: image_text.zero_shot_scores(
        model.load(), images(model, data, fields={}), NAMES
    ),
    "evaluate --retrieval": lambda model, data: image_text.embed_pairs(
        model.load(), images(model, data, fields=image_text.CAPTIONS)
    ),
    "validation": validated,
}


@pytest.mark.parametrize("tensor", ["image.norm.weight", "text.norm.weight"])
@pytest.mark.parametrize("entry", TOWERS)
def test_two_towers_answer_nothing(entry: str, tensor: str, captioned: str, tmp_path: Path) -> None:
    run: RunConfig = small_run(classes=NAMES.classes)
    path = str(tmp_path / "towers.safetensors")
    write_file(path, run.model.build(seed=0).state_dict(), {"config": json.dumps(to_dict(run))})
    with pytest.raises(UsageError, match="not finite"):
        TOWERS[entry](damaged(read_model(path), tensor), captioned)
