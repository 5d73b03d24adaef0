"""The signature of a model in folders of other libraries, and back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.checkpoint.models import read_model
from tests.orchestrator.checkpoint.test_signature import RUN, SIGNED, write_signed
from wings.weights import foreign_folder, plan_import, write_import
from wings.weights.outward import write_foreign


@pytest.mark.parametrize("library", ["timm", "huggingface"])
def test_other_libraries_take_it_and_give_it_back(library: str, tmp_path: Path) -> None:
    signed = write_signed(tmp_path / "signed")
    out, back = str(tmp_path / "theirs"), str(tmp_path / "back")
    write_foreign(out, foreign_folder(library, signed), signed)  # pyright: ignore[reportArgumentType]
    write_import(plan_import(out, name="back"), back)
    found = read_model(f"{back}/model.safetensors")
    assert found.signature.source.startswith(("timm", "Hugging Face"))
    assert replace(found.signature, source=SIGNED.source, licence=SIGNED.licence) == SIGNED
    assert found.run.task == RUN.task
    config = json.loads(Path(out, "config.json").read_text())
    assert library == "timm" or config["problem_type"] == "multi_label_classification"


def test_what_the_library_says_since_then_goes_before(tmp_path: Path) -> None:
    """transformers keeps the signature of a model that it trains on and saves: with another head and crop."""
    signed, out = write_signed(tmp_path / "signed"), tmp_path / "theirs"
    write_foreign(str(out), foreign_folder("huggingface", signed), signed)
    config = json.loads((out / "config.json").read_text())
    processor = json.loads((out / "preprocessor_config.json").read_text())
    single = {"problem_type": "single_label_classification", "id2label": {"0": "a", "1": "b", "2": "c"}}
    (out / "config.json").write_text(json.dumps(config | single))
    other = {"do_center_crop": False, "size": {"height": 16, "width": 16}}
    (out / "preprocessor_config.json").write_text(json.dumps(processor | other))
    planned = plan_import(str(out), name="back")
    assert (planned.run.task.output, planned.facts.classes) == ("softmax", ("a", "b", "c"))
    assert planned.run.data.eval_crop == 1
    assert "not of its signature any more" in str(planned)
    assert "its signature: background white, white 4095" in str(planned)
