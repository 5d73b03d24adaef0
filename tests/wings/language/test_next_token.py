"""Next token: bits per byte by hand, steps that do not depend on workers, and evaluation by prefixes."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moe.layer import MoEConfig
from moe.overrides import AS_TRAINED
from moe.routers import MixtureConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from orchestrator.checkpoint.card import model_card
from orchestrator.checkpoint.weights import signature_of
from orchestrator.codec import override
from orchestrator.config import FewShotConfig, RunConfig, TrainConfig
from orchestrator.data.batch import Batch
from orchestrator.errors import UsageError
from orchestrator.packing.pack import digits
from orchestrator.runs.metrics_file import Metrics
from orchestrator.schedules import ConstantConfig
from orchestrator.training.fewshot import FewShot
from orchestrator.training.fit import fit
from orchestrator.training.loop import evaluate, train_step
from orchestrator.training.worker import build_model
from tests.orchestrator.as_one import Case, check_ranks_train_as_one
from wings.language.decoder import DecoderConfig
from wings.language.next_token import NextTokenConfig
from wings.language.sequences import SEQUENCE

BATCH, L = 8, 12
ROUTERS: dict[str, RouterConfig | None] = {
    "dense": None,
    "token_choice": TokenChoiceConfig(k=1, capacity_factor=1.0, noise_std=1.0),
    "mixture": MixtureConfig(),
}
LAYOUTS: dict[str, dict[str, Any]] = {  # of two workers
    "dense": {"train.microbatch": 2},
    "token_choice": {},
    "mixture": {"scale.ep": 2},
}


def small_run(router: str = "dense") -> RunConfig:
    found = ROUTERS[router]
    moe = found and MoEConfig(num_experts=4, layers="last_1", router=found)
    run = RunConfig(
        model=DecoderConfig(length=L, width=16, depth=2, heads=2, mlp_dim=32, moe=moe),
        task=NextTokenConfig(),
        train=TrainConfig(lr=0.01, steps=20, schedule=ConstantConfig(warmup_steps=0)),
    )
    return override(run, {"data.batch_size": BATCH})


def random_batch(seed: int = 0, valid: int = BATCH) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    return Batch(
        fields={SEQUENCE: torch.randint(97, 123, (BATCH, L + 1), generator=rng, dtype=torch.uint8)},
        valid=(torch.arange(BATCH) < valid).float(),
        key=torch.arange(BATCH) + 100 * seed,
        sample=torch.arange(BATCH),
    )


def test_bits_are_those_of_a_loop() -> None:
    task, batch = NextTokenConfig(), random_batch(valid=6)
    logits = torch.randn(BATCH, L, 256, generator=torch.Generator().manual_seed(2))
    chances = logits.double().softmax(-1)
    each = [
        [-math.log2(float(chances[row, at, int(batch[SEQUENCE][row, at + 1])])) for at in range(L)]
        for row in range(BATCH)
    ]
    share, metrics = task.loss_share({"next_byte": logits}, batch, 2 * BATCH)
    assert float(share) == pytest.approx(sum(map(sum, each)) / (2 * BATCH * L), rel=1e-6)
    assert float(metrics["train/bits_per_byte"]) == float(share)
    found = task.metrics(task.scores({"next_byte": logits}, batch))
    assert found["bits_per_byte"] == pytest.approx(sum(map(sum, each[:6])) / (6 * L), rel=1e-6)
    assert found["likelihood"] == pytest.approx(2 ** -found["bits_per_byte"])
    guess = task.metrics(task.scores({"next_byte": torch.zeros_like(logits)}, batch))
    assert guess["bits_per_byte"] == pytest.approx(8)
    assert guess["likelihood"] == pytest.approx(task.chance(small_run().model))


@pytest.mark.smoke
def test_two_workers_train_as_one(tmp_path: Path) -> None:
    compared = dict.fromkeys(("train/loss", "train/bits_per_byte", "val/bits_per_byte"), 1e-6)
    cases = {
        router: Case(run=small_run(router), layouts=[layout], batch=random_batch, compared=compared)
        for router, layout in LAYOUTS.items()
    }
    for first, *_, last, _ in check_ranks_train_as_one(cases, tmp_path).values():
        assert last["train/bits_per_byte"] < first["train/bits_per_byte"]


def test_what_it_reports_is_described() -> None:
    run = small_run()
    model, batch = build_model(run, torch.device("cpu"), seed=1), random_batch()
    reported = train_step(model, run.train.optimizer.build(model), batch, run, step=0)
    own = {*reported} - {"train/loss", "train/loss_router", "train/grad_norm", "train/lr"}
    measured = {name for name in evaluate(model, [batch], run) if name.startswith("val/")}
    assert own | measured == {*run.task.described}
    assert run.task.quality in measured


def test_a_run_that_pauses_goes_on_to_the_bit(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "model.length": 128,
        "train.steps": 6,
        "train.report_every": 1,
        "checkpoint.every": 2,
        "storage": str(tmp_path),
        "data.path": digits(str(tmp_path), "python-topics"),
    }
    whole, paused = (override(small_run("token_choice"), {**changes, "name": name}) for name in ("a", "b"))
    found: dict[str, list[float]] = {"a": [], "b": []}

    def report(name: str, step: int, metrics: Metrics) -> None:
        found[name].append(metrics["train/loss"])

    expected = fit(whole, partial(report, "a"))
    fit(paused, partial(report, "b"), until=3)
    ended = fit(paused, partial(report, "b"))
    assert found["a"] == found["b"]
    assert len(found["a"]) == 6
    for name in ("val/bits_per_byte", "data/fingerprint"):
        assert ended.metrics[name] == expected.metrics[name]


def test_what_needs_images_says_so() -> None:
    with pytest.raises(UsageError, match="few shots are of images, and a model of kind 'decoder' reads none"):
        FewShot(small_run(), FewShotConfig())
    run = small_run()
    card = model_card(run, signature_of(run), metrics={"val/bits_per_byte": 3.0}, metadata={}, source=None)
    assert "image" not in card.partition("## Use")[2]
    assert "tokens: (B, 12) int32" in card


class Unchecked(DecoderConfig):
    def __post_init__(self) -> None:
        pass


@pytest.mark.parametrize("router", [*ROUTERS, "soft"])
def test_prefixes_tell_a_model_that_sees_the_future(router: str) -> None:
    config = small_run(router if router in ROUTERS else "dense").model
    if router == "soft":
        moe = MoEConfig(num_experts=4, layers="last_1", router=SoftConfig(slots_per_expert=3))
        config = Unchecked(length=L, width=16, depth=2, heads=2, mlp_dim=32, moe=moe)
    model = config.build().eval()
    torch.nn.init.normal_(model.get_submodule("head").get_parameter("weight"))
    found = NextTokenConfig().of_model(model, random_batch(valid=6), AS_TRAINED)
    gap = abs(found["prefix_bits_per_byte"] - found["whole_bits_per_byte"])
    assert gap > 1e-3 if router == "soft" else gap < 1e-5


def test_prefixes_tell_a_model_that_sees_the_next_byte() -> None:
    def peeks(inputs: Any, valid: Any, routing_overrides: Any) -> Any:
        return SimpleNamespace(heads={"next_byte": 20.0 * F.one_hot(inputs.roll(-1, 1).long(), 256)})

    found = NextTokenConfig().of_model(peeks, random_batch(), AS_TRAINED)  # pyright: ignore[reportArgumentType]
    assert found["prefix_bits_per_byte"] > 2 * found["whole_bits_per_byte"]
