"""Which answers are kept, and for what."""

from dataclasses import replace
from pathlib import Path

import torch

from orchestrator.evaluation import parallel
from orchestrator.evaluation.latency import Latency
from orchestrator.evaluation.parallel import Question
from orchestrator.evaluation.trained import read_trained


def test_answers_hold_for_the_labels_and_weights_that_they_were_given_for(trained_home: Path, digits: str):
    """Not for a model that learned its classes in another order."""
    model = read_trained(f"{trained_home}/tiny/trials/soft/checkpoints")
    assert model.classes == tuple("0123456789")
    question = Question(model=model, points=(), path=digits, split="val", batch_size=8, answers="")
    turned = replace(model, classes=tuple("9876543210"))
    keys = {replace(question, model=m).key("w") for m in (model, replace(model, classes=None), turned)}
    assert len(keys) == 2, "labels are the same by number and by name in the same order"
    assert question.key("other weights") not in keys


def test_a_digest_sees_every_bit():
    model = torch.nn.Linear(2, 2)
    before = parallel.weights_sha256(model)
    assert parallel.weights_sha256(model) == before
    with torch.no_grad():
        model.weight[1, 1] = torch.nextafter(model.weight[1, 1], torch.tensor(9.0))
    assert parallel.weights_sha256(model) != before


def test_models_take_turns_in_rounds(trained_home: Path, digits: str):
    """Each is timed once a round; medians and quartiles are those of the passes of all rounds so far.

    The first model's passes take 1 and 2 ms in round 1, 3 and 4 in round 2, 5 and 6 in round 3: the quartiles
    of 1 .. 6 are 2.25, 3.5 and 4.75.
    """
    model = read_trained(f"{trained_home}/tiny/trials/soft/checkpoints")
    questions = [
        Question(
            model=replace(model, name=name), points=(), path=digits, split="val", batch_size=8, answers=""
        )
        for name in ("a", "b")
    ]
    order: list[str] = []

    def measured(question: Question) -> list[Latency]:
        order.append(question.model.name)
        start = order.count(question.model.name) * 2.0 - 1
        passes = (start, start + 1) if question.model.name == "a" else (7.0, 7.0)
        return [Latency(ms=passes, batch=8, device="CPU, 1 thread")]

    found = [(question.model.name, rows) for question, rows in parallel.in_rounds(questions, measured)]
    assert order == ["a", "b"] * 3 == [name for name, _ in found]
    (first,), (last,) = found[0][1], found[-2][1]
    assert (first["perf/ms_per_image"], first["rounds"], first["repeats"]) == (1.5, 1, 2)
    assert last == {
        "perf/ms_per_image": 3.5,
        "perf/ms_per_image_q25": 2.25,
        "perf/ms_per_image_q75": 4.75,
        "batch": 8,
        "device": "CPU, 1 thread",
        "rounds": 3,
        "repeats": 2,
    }
    assert found[-1][1][0]["perf/ms_per_image_q25"] == 7.0
