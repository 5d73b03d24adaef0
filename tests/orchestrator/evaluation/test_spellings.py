"""Labels found by names that data and model spell differently."""

import csv
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import imagenet_names
from orchestrator.checkpoint.models import ModelRef
from orchestrator.checkpoint.weights import signature_of
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch
from orchestrator.errors import UsageError
from orchestrator.evaluation.spellings import SHIPPED, outputs_of_labels, relabelled
from tests.orchestrator.checkpoint.test_classes import data_of

WNID, WORDS, SHORT = zip(*imagenet_names.rows(), strict=True)


def named(classes: Any) -> ModelRef:
    run = RunConfig()
    return ModelRef(name="m", location="", run=run, step=0, signature=signature_of(run, classes=classes))


def found(data: Any, model: Any, folder: Path, spellings: str = "imagenet") -> tuple[int, ...]:
    return outputs_of_labels(named(model), data_of(folder, tuple(data)), spellings)


def test_imagenet_comes_in_three_spellings(tmp_path: Path) -> None:
    """The file is what timm and torchvision say, and each spelling finds the outputs of each other, in any
    order: also of the two cranes that timm spells alike.
    """
    with open(SHIPPED["imagenet"], newline="") as file:
        assert [*csv.reader(file)] == [[*imagenet_names.HEADER], *map(list, imagenet_names.rows())]
    order = random.Random(0).sample(range(1000), 1000)
    for here in (WNID, SHORT):
        for there in (WNID, WORDS, SHORT):
            assert found(here, there, tmp_path / "all") == (*range(1000),)
            some = [here[label] for label in order[:100]]
            assert found(some, there, tmp_path / "some") == (*order[:100],)
    assert found(WORDS, WNID, tmp_path / "words") == (*range(1000),)
    assert found([WNID[label] for label in order], WORDS, tmp_path / "b") == (*order,)
    # Which of the two cranes is meant cannot be known.
    with pytest.raises(UsageError, match="no column has all 2 names; the nearest has a name more than once"):
        found([WORDS[134], WORDS[0]], WNID, tmp_path / "c")


def test_a_file_of_two_columns(tmp_path: Path) -> None:
    file = tmp_path / "names.csv"
    file.write_text('cat,"Katze, Haus-"\ndog, Hund\n\nowl,Eule\n')
    german = ("Eule", "Hund", "Katze, Haus-")
    assert found(("cat", "dog", "owl"), german, tmp_path / "a", str(file)) == (2, 1, 0)
    assert found(("dog",), german, tmp_path / "b", str(file)) == (1,)
    refused = {
        "lacks 'ant'": (("ant", "dog"), german),
        r"no output for 1 classes of .*such as 'owl'": (("cat", "owl"), german[1:]),
        r"m, by .*the nearest lacks 'Ente'": (("cat",), ("Ente",)),
    }
    for number, (message, (data, model)) in enumerate(refused.items()):
        with pytest.raises(UsageError, match=message):
            found(data, model, tmp_path / str(number), str(file))
    for content, message in (("a,b\nc\n", "as many names each"), ("a\nb\n", "has 1 columns"), ("", "has 0")):
        file.write_text(content)
        with pytest.raises(UsageError, match=message):
            found(("a",), ("b",), tmp_path / "bad", str(file))
    with pytest.raises(UsageError, match="m has no names of classes"):
        outputs_of_labels(named(None), data_of(tmp_path / "z", ("a",)), "imagenet")


def test_labels_become_outputs() -> None:
    """-1 stays no label."""
    label, one = torch.tensor([[0, -1], [2, 1]]), torch.ones(2)
    batch = Batch(fields={"label": label}, valid=one, key=one, sample=one)
    (found,) = relabelled([batch], (5, 3, 9))
    assert found["label"].tolist() == [[5, -1], [9, 3]]
    assert next(relabelled([batch], None)) is batch


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    """Excel writes one."""
    file = tmp_path / "names.csv"
    file.write_text("cat,Katze\ndog,Hund\n", encoding="utf-8-sig")
    assert found(("cat", "dog"), ("Hund", "Katze"), tmp_path / "a", str(file)) == (1, 0)
