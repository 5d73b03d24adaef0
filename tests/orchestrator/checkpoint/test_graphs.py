"""Models as graphs of torch.export and ONNX: the outputs of the model, at numbers of images never traced."""

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe.model import Model
from moe.models.vit import ViTConfig
from moe.signature import Signature
from orchestrator.checkpoint import graphs
from orchestrator.codec import read_config
from orchestrator.errors import UsageError
from tests.parts import library

SIGNED = Signature(image_size=16, classes=("cat", "dog"))
# Few iterations: each is a part of the graph, and takes the exporter a second.
ASSIGNMENT = {"kind": "sparse_transport", "iterations": 4}
CASES: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "soft": {"router": {"kind": "soft", "slots_per_expert": 2}},
    "soft, uniform": {"router": {"kind": "soft", "dispatch": "uniform"}},
    "soft, groups": {"router": {"kind": "soft"}, "images_per_group": 2},
    "mixture": {"router": {"kind": "mixture", "level": "hierarchical", "clusters": 2}},
    "mixture, groups": {"router": {"kind": "mixture", "level": "image"}, "images_per_group": 2},
    "token choice": {"router": {"kind": "token_choice", "k": 2, "topk": "before"}},
    "token choice, groups": {"router": {"kind": "token_choice", "priority": "max"}, "images_per_group": 2},
    "token choice, sinkhorn": {"router": {"kind": "token_choice", "affinity": {"kind": "sinkhorn"}}},
    "token choice, short sinkhorn": {
        "router": {"kind": "token_choice", "affinity": {"kind": "sinkhorn", "iterations": 4}}
    },
    "top-k": {"router": {"kind": "top_k", "k": 2, "balance_weight": 0.1, "balance_level": "pass"}},
    "dropless": {"router": {"kind": "top_k", "capacity_factor": "dropless", "balance": {"kind": "sign"}}},
    "relu": {"router": {"kind": "relu"}, "images_per_group": 2, "shared_dim": 8},
    "expert choice": {"router": {"kind": "expert_choice"}},
    "expert choice, sinkhorn": {"router": {"kind": "expert_choice", "affinity": {"kind": "sinkhorn"}}},
    "expert choice, assignment": {"router": {"kind": "expert_choice", "affinity": ASSIGNMENT}},
    "expert choice, semi-dual": {
        "router": {"kind": "expert_choice", "affinity": ASSIGNMENT, "capacity_factor": 2}
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "class token": {"pooling": "token", "representation_size": 8, "gelu": "exact"},
    "attention pooling": {"pooling": "map", "position": "sincos2d", "stem": "conv"},
}


def built(moe: dict[str, Any] | None, **fields: Any) -> Model:
    tree = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "heads": 2, "mlp_dim": 24}
    if moe is not None:
        tree["moe"] = {"num_experts": 4, **moe}
    model = read_config(ViTConfig, {"kind": "vit", **tree, "num_classes": 5, **fields}).build(seed=1)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))  # pyright: ignore
    return model.eval()


@cache
def built_case(name: str) -> Model:
    return built(CASES.get(name), **MODELS.get(name, {}))


@pytest.fixture(scope="module", autouse=True)
def _exported_once() -> Iterator[None]:
    """Programs and ONNX are made of the same export of a model, which takes the exporter seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "program_of", cache(graphs.program_of))
        yield


SMOKE = ("soft", "token choice, short sinkhorn", "dropless", "expert choice", "attention pooling")


def models() -> list[Any]:
    return [
        pytest.param(name, marks=pytest.mark.smoke if name in SMOKE else pytest.mark.slow)
        for name in (*CASES, *MODELS)
    ]


@pytest.mark.parametrize("name", models())
def test_a_program_of_torch(name: str, tmp_path: Path) -> None:
    """The same operators in the same order: equal to the bit. Of a dropless model it has slots."""
    bound = 1e-6 if name == "dropless" else 0
    assert graphs.write_program(built_case(name), str(tmp_path / "model.pt2"), SIGNED) <= bound
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]


@pytest.mark.parametrize("name", models())
def test_onnx(name: str, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        library(package)
    assert graphs.write_onnx(built_case(name), str(tmp_path / "model.onnx"), SIGNED) < 2e-6


@pytest.mark.smoke
def test_onnx_answers_image_by_image_alike_with_any_number_of_threads(tmp_path: Path) -> None:
    """To the bit; in larger batches the runtime rounds some sums in another order."""
    runtime, path = library("onnxruntime"), str(tmp_path / "model.onnx")
    model = built(CASES["token choice"], mlp_dim=1024)
    graphs.write_onnx(model, path, SIGNED)
    images, found = (torch.rand(6, 3, 16, 16) * 2 - 1).numpy(), []
    for threads in (1, 2, 3):
        options = runtime.SessionOptions()
        options.intra_op_num_threads = threads
        session = runtime.InferenceSession(path, options)
        alone = [session.run(None, {"images": images[i : i + 1]})[0] for i in range(6)]
        found.append(torch.from_numpy(np.concatenate(alone)))
        together = torch.from_numpy(session.run(None, {"images": images})[0])
        torch.testing.assert_close(together, found[0])
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.smoke
def test_a_program_runs_where_the_project_is_unknown(tmp_path: Path) -> None:
    """Our own operators are not in it."""
    model = built_case("token choice, short sinkhorn")
    graphs.write_program(model, str(tmp_path / "model.pt2"), SIGNED)
    torch.save(images := torch.rand(5, 3, 16, 16), tmp_path / "images")
    code = (
        "import sys, torch\n"
        "program = torch.export.load('model.pt2').module()\n"
        "torch.save(program(torch.load('images'))['logits'], 'logits')\n"
        "assert 'moe' not in sys.modules"
    )
    subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, check=True, timeout=120)
    assert torch.equal(torch.load(tmp_path / "logits"), model(images).logits)


def test_the_difference_is_that_of_the_outputs() -> None:
    model = built(None)

    def off(images: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = model(images).logits
        return {"logits": logits + 0.25 * logits.abs().max() * (len(images) == 3)}

    assert graphs.difference(model, off) == pytest.approx(0.25)


def test_onnx_needs_an_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        UsageError, match=r"needs the package onnxruntime: pip install 'moe-frontier\[export\]'"
    ):
        graphs.write_onnx(built(None), str(tmp_path / "model.onnx"), SIGNED)
    assert not [*tmp_path.iterdir()]
