"""A model that 1, 2 or 4 processes hold together has the figures of the whole model, in float64."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.model import Model
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.parallel import make_mesh, this_rank
from orchestrator.checkpoint.models import ModelRef, read_model
from orchestrator.checkpoint.weights import write_file
from orchestrator.codec import override, to_dict
from orchestrator.config import FewShotConfig, RunConfig
from orchestrator.data.preparation import Preparation
from orchestrator.evaluation import evaluate
from orchestrator.evaluation.predict import Predictor, list_parts, predict_together
from orchestrator.evaluation.sharded import Sharding
from orchestrator.training.fewshot import few_shots
from tests.lanes import mostly_slow
from tests.moe.parity import default_dtype, one_rank, spawn
from tests.moe.parts import images

LAYOUTS = {1: (1,), 2: (1, 2), 4: (1, 2, 4)}  # ranks -> ep
SMALL = {"model.width": 16, "model.depth": 4, "model.moe.num_experts": 4}
TOKENS = {"model.moe.router.kind": "token_choice", "model.moe.router.k": 2, "model.moe.images_per_group": 2}
DRAWN = RoutingOverrides(experts=2, subset_seed=3)
POINTS = (AS_TRAINED, RoutingOverrides(experts=2), DRAWN, RoutingOverrides(random_blocks=(3,)))
EXPERTS = {"model.moe.router.kind": "expert_choice"}
CASES = {
    "soft": ({**SMALL, "model.moe.router.kind": "soft"}, POINTS),
    "token": (SMALL | TOKENS, (*POINTS, RoutingOverrides(k=1, capacity_factor=0.5, priority="max"))),
    "expert": (SMALL | EXPERTS, (*POINTS, RoutingOverrides(capacity_factor=0.5))),
}


def exported(name: str, folder: Path, run: RunConfig | None = None) -> ModelRef:
    """A model of random weights, none of which is zero: no figure is that of chance."""
    run = run or override(RunConfig(), CASES[name][0])
    model, path = run.model.build(seed=0), f"{folder}/{name}.safetensors"
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    write_file(path, model.state_dict(), {"config": json.dumps(to_dict(run))})
    return read_model(path)


@contextmanager
def exact() -> Iterator[None]:
    """Lets images, logits and features be float64, as the weights are."""
    before, torch.Tensor.float = torch.Tensor.float, torch.Tensor.double
    try:
        with default_dtype(torch.float64):
            yield
    finally:
        torch.Tensor.float = before


def figures(name: str, ref: ModelRef, model: Model, data: str) -> dict[str, Any]:
    where: Any = {"path": data, "split": "val", "batch_size": 32}
    task = evaluate.EvalTask(model=ref, points=CASES[name][1], results="", **where)
    found = evaluate.figures(model, task, repeats=1)
    assert found.latency.batch == 32
    return {
        "scores": [each.sums["classes"] for each in found.scores],
        "answers": vars(found.answers) | {"notes": len(found.answers.notes)},
        "few shots": few_shots(model, ref.run_on(data, batch_size=32), FewShotConfig(shots=(1, 5), seeds=2)),
        "predictions": predictions(ref, model, data, DRAWN),
    }


def predictions(ref: ModelRef, model: Model, data: str, point: RoutingOverrides) -> list[dict[str, Any]]:
    """Of the whole model, or those that this rank puts."""
    settings: Any = {"point": point, "images": data, "classes": None, "preparation": Preparation()}
    _, parts = list_parts(data, "val", group=2)
    if not torch.distributed.is_initialized():
        whole = Predictor(model=ref, batch_size=16, shared=None, **settings)
        return [row for part in parts for row in whole.table(part).to_pylist()]
    tables: list[Any] = []

    class Here(Sharding):
        def answers(
            self, model: ModelRef, function: Callable[..., None], *, batch_size: int
        ) -> Iterator[Any]:
            function(here, tables.append)
            return iter(tables)

    here, sharding = model, Here(workers=this_rank()[1], root="")
    return [
        row
        for table in predict_together(parts, sharding, ref, batch_size=16, **settings)
        for row in table.to_pylist()
    ]


def close(got: Any, expected: Any, what: str) -> None:
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")
    elif isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            close(got[name], value, f"{what}, {name}")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), what
        for number, value in enumerate(expected):
            close(got[number], value, f"{what}, {number}")
    else:
        same = got == pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else got == expected
        assert same, f"{what}: {got}, expected {expected}"


Figures = Callable[[str, ModelRef, Model, str], dict[str, Any]]


def worker(rank: int, ranks: int, folder: str) -> None:
    check_layouts(rank, ranks, folder, figures)


def check_layouts(rank: int, ranks: int, folder: str, figures: Figures) -> None:
    found = torch.load(f"{folder}/figures", weights_only=False)
    with exact():
        for ep in LAYOUTS[ranks]:
            mesh = make_mesh("cpu", ep=ep)
            for name, (data, expected) in found.items():
                ref = read_model(f"{folder}/{name}.safetensors")
                model = ref.load_sharded(mesh)
                before = evaluate.hash_of_bits(model)
                got = figures(name, ref, model, data)
                assert evaluate.hash_of_bits(model) == before
                rows = got.pop("predictions", [])
                known = {row["key"]: row for row in expected["predictions"]} if rows else {}
                close(rows, [known[row["key"]] for row in rows], f"{name}, {ep=}, predictions of {rank}")
                close(got, {n: value for n, value in expected.items() if n in got}, f"{name}, {ep=}")


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", mostly_slow((1, 2, 4), fast=(2,)))
def test_figures_are_those_of_the_whole_model(ranks: int, few_digits: str, tmp_path: Path):
    with exact():
        found = {}
        for name in CASES:
            ref = exported(name, tmp_path)
            found[name] = few_digits, figures(name, ref, ref.load(), few_digits)
        torch.save(found, tmp_path / "figures")
    spawn(ranks, worker, str(tmp_path))


@pytest.mark.parametrize("name", CASES)
def test_points_in_bfloat16_are_those_of_forward_passes(name: str, tmp_path: Path):
    points, pixels = CASES[name][1], images(8)
    with one_rank("cpu") as mesh:
        model = exported(name, tmp_path).load_sharded(mesh, torch.bfloat16)
        together = model.at_points(pixels, None, points)
        with torch.no_grad():
            alone = [model(pixels, routing_overrides=point).logits for point in points]
    for found, expected in zip(together, alone, strict=True):
        assert found["logits"].dtype == torch.float32
        assert torch.equal(found["logits"], expected)
    whole = exported(name, tmp_path).load()(pixels).logits
    assert 0 < (alone[0] - whole).abs().max() < 0.05 * whole.abs().max()
