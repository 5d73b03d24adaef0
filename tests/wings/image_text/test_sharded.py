"""Two towers that 1, 2 or 4 processes hold together have the figures of the whole model, in float64."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.model import Model
from orchestrator.checkpoint.models import ModelRef
from orchestrator.evaluation import evaluate
from tests.lanes import mostly_slow
from tests.moe.parity import spawn
from tests.orchestrator.evaluation.test_sharded import check_layouts, exact, exported
from tests.wings.image_text.test_contrastive import small_run
from wings.image_text.evaluation import CAPTIONS, ClassNames, embed_pairs, zero_shot_scores

WORDS = ("zero", "one", "two", "three", "a", "photo", "of", "the", "digit", "zero one")  # that towers know
NAMES = ClassNames(classes=WORDS, templates=("a photo of {}", "{}"))


def figures(name: str, ref: ModelRef, model: Model, data: str) -> dict[str, Any]:
    read = partial(evaluate.images_of, ref, path=data, split="val", batch_size=64)
    pairs = embed_pairs(model, read(fields=CAPTIONS))
    zero_shot = zero_shot_scores(model, read(fields={}), NAMES)
    return {**pairs._asdict(), **{words: scores.metrics() for words, scores in zero_shot.items()}}


def worker(rank: int, ranks: int, folder: str) -> None:
    check_layouts(rank, ranks, folder, figures)


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", mostly_slow((1, 2, 4), fast=(2,)))
def test_figures_are_those_of_the_whole_model(ranks: int, captioned: str, tmp_path: Path):
    with exact():
        ref = exported("towers", tmp_path, small_run("soft"))
        found = {"towers": (captioned, figures("towers", ref, ref.load(), captioned))}
        torch.save(found, tmp_path / "figures")
    spawn(ranks, worker, str(tmp_path))
