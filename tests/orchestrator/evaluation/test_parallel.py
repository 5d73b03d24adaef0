"""Which answers are kept, and for what."""

from dataclasses import replace
from pathlib import Path

import torch

from orchestrator.evaluation import parallel
from orchestrator.evaluation.parallel import Question
from orchestrator.evaluation.trained import read_trained


def test_answers_hold_for_the_labels_that_they_were_given_for(trained_home: Path, digits: str):
    """Not for a model that learned its classes in another order."""
    model = read_trained(f"{trained_home}/tiny/trials/soft/checkpoints")
    assert model.classes == tuple("0123456789")
    question = Question(model=model, points=(), path=digits, split="val", batch_size=8, answers="")
    turned = replace(model, classes=tuple("9876543210"))
    keys = {replace(question, model=m).key("w") for m in (model, replace(model, classes=None), turned)}
    assert len(keys) == 2, "labels are the same by number and by name in the same order"


def test_a_digest_sees_every_bit():
    model = torch.nn.Linear(2, 2)
    before = parallel.weights_sha256(model)
    assert parallel.weights_sha256(model) == before
    with torch.no_grad():
        model.weight[1, 1] = torch.nextafter(model.weight[1, 1], torch.tensor(9.0))
    assert parallel.weights_sha256(model) != before
