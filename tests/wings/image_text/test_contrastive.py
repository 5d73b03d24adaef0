"""Contrastive learning: its loss as a loop, and steps that do not depend on workers and microbatches."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moe.init import mix
from moe.layer import MoEConfig
from moe.models.vit import ViTConfig
from moe.routers import RouterConfig, SoftConfig, TokenChoiceConfig
from moe.tokenizers import WordsConfig
from orchestrator.codec import override, read_config, to_dict
from orchestrator.config import RunConfig, TrainConfig
from orchestrator.data.batch import Batch
from orchestrator.errors import UsageError
from orchestrator.schedules import ConstantConfig
from orchestrator.training.loop import train_step
from orchestrator.training.worker import build_model
from tests.lanes import mostly_smoke
from tests.moe.parity import default_dtype
from tests.moe.test_on_device import OnDevice
from tests.orchestrator.as_one import Case, check_ranks_train_as_one
from wings.image_text.contrastive import ContrastiveConfig, Pairs, chance_loss, pair_losses
from wings.image_text.text_tower import TextConfig
from wings.image_text.two_towers import ImageText, TwoTowers, TwoTowersConfig

BATCH, CAPTIONS, LENGTH = 8, 2, 6
WORDS = WordsConfig(vocabulary="\n".join(["a", "photo", "of", "the", "digit", "zero", "one", "two", "three"]))
ROUTERS: dict[str, RouterConfig | None] = {
    "dense": None,
    "soft": SoftConfig(slots_per_expert=2),
    "token_choice": TokenChoiceConfig(k=2, noise_std=1.0),
}
FROZEN = {"trained": (), "frozen": ("image.",)}


def towers(router: RouterConfig | None, **changes: Any) -> TwoTowersConfig:
    moe = router and MoEConfig(num_experts=4, layers="last_1", router=router)
    sizes = {"width": 16, "depth": 2, "heads": 2, "mlp_dim": 32, "moe": moe}
    image = ViTConfig(image_size=8, patch_size=4, **sizes)
    text = TextConfig(tokenizer=WORDS, vocabulary=WORDS.size(), length=LENGTH, **sizes)
    return TwoTowersConfig(image=image, text=text, **changes)


def small_run(router: str = "dense", freeze: tuple[str, ...] = (), **task: Any) -> RunConfig:
    run = RunConfig(
        model=towers(ROUTERS[router]),
        task=ContrastiveConfig(captions=CAPTIONS, **task),
        train=TrainConfig(lr=0.01, steps=20, schedule=ConstantConfig(warmup_steps=0), freeze=freeze),
    )
    return override(run, {"data.batch_size": BATCH})


def random_batch(seed: int = 0, valid: int = BATCH) -> Batch:
    """Images in float64, each with one caption or two."""
    rng = torch.Generator().manual_seed(seed)
    text = torch.randint(WORDS.size(), (BATCH, CAPTIONS, LENGTH), generator=rng, dtype=torch.int32)
    text[::3, 1] = -1
    return Batch(
        fields={
            "image": torch.rand(BATCH, 3, 8, 8, generator=rng).double() * 2 - 1,
            "label": torch.randint(4, (BATCH, 1), generator=rng),
            "text": text,
        },
        valid=(torch.arange(BATCH) < valid).float(),
        key=torch.arange(BATCH) + 100 * seed,
        sample=torch.arange(BATCH),
    )


def by_loop(
    kind: str, image: list[list[float]], text: list[list[float]], scale: float, bias: float, same: Any
):
    """The loss of pairs of unit vectors; `same(i, j)`: whether image i and text j belong together."""
    n = len(image)
    logit = [[scale * sum(a * b for a, b in zip(u, v, strict=True)) for v in text] for u in image]
    if kind == "sigmoid":
        return sum(
            math.log1p(math.exp((-1 if same(i, j) else 1) * (logit[i][j] + bias)))
            for i in range(n)
            for j in range(n)
        ) / n  # fmt: skip
    total = 0.0
    for i in range(n):
        for row in (logit[i], [logit[j][i] for j in range(n)]):
            right = [j for j in range(n) if same(i, j)]
            norm = math.log(sum(math.exp(x) for x in row))
            total += sum(norm - row[j] for j in right) / len(right)
    return total / (2 * n)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("keys", [[0, 1, 2, 3], [0, 1, 0, 3]], ids=["differ", "match"])
def test_the_loss_is_that_of_a_loop(kind: Any, keys: list[int]) -> None:
    rng = torch.Generator().manual_seed(0)
    image, text = (torch.nn.functional.normalize(torch.randn(4, 3, generator=rng).double()) for _ in range(2))
    scale = torch.tensor([math.log(5.0), -2.0]).double().expand(4, 2)
    pairs = Pairs.of(image, text, scale, torch.ones(4).double(), torch.tensor(keys))
    expected = by_loop(kind, image.tolist(), text.tolist(), 5.0, -2.0, lambda i, j: keys[i] == keys[j])
    assert float(pair_losses(kind, pairs)[0].mean()) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_nothing_learnt_is_the_loss_of_chance(kind: Any) -> None:
    n = 64
    best = torch.tensor([0.0, -math.log(n - 1)]).expand(n, 2)
    pairs = Pairs.of(torch.zeros(n, 3), torch.zeros(n, 3), best, torch.ones(n), torch.arange(n))
    losses, right = pair_losses(kind, pairs)
    assert float(losses.mean()) == pytest.approx(chance_loss(kind, n), rel=1e-5)
    assert float(right.mean()) == pytest.approx(1 / n)  # not 1: equal cosines find nothing


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_a_loss_waits_for_nothing(loss: Any) -> None:
    """Fake tensors need no GPU; what is copied to it comes from the host."""
    with FakeTensorMode():
        batch = random_batch().map(lambda field: field.cuda())
        heads = {name: torch.empty(BATCH, 4, device="cuda") for name in ("image", "text")}
        heads["scale"] = torch.empty(BATCH, 2, device="cuda")
        with OnDevice():
            share, metrics = ContrastiveConfig(loss=loss).loss_share(heads, batch, BATCH)
    assert all(value.is_cuda for value in (share, *metrics.values()))


@pytest.mark.parametrize(
    ("loss", "router", "frozen"),
    mostly_smoke(
        product(["softmax", "sigmoid"], ROUTERS, FROZEN),
        fast=[
            ("softmax", "dense", "frozen"),
            ("softmax", "token_choice", "trained"),
            ("sigmoid", "soft", "frozen"),
            ("sigmoid", "token_choice", "trained"),
        ],
    ),
)
def test_microbatches_have_the_loss_and_the_gradients_of_the_whole(
    router: str, loss: str, frozen: str
) -> None:
    found = []
    with default_dtype(torch.float64):
        for microbatch in (None, 4, 2, 1):
            run = override(small_run(router, FROZEN[frozen], loss=loss), {"train.microbatch": microbatch})
            model = build_model(run, torch.device("cpu"), seed=1)
            metrics = train_step(model, run.train.optimizer.build(model), random_batch(), run, step=0)
            gradients = {name: param.grad for name, param in model.named_parameters()}
            found.append(gradients | {"the loss": metrics["train/loss"]})
    for other in found[1:]:
        for name, expected in found[0].items():
            if expected is None:
                assert other[name] is None
            else:
                torch.testing.assert_close(other[name], expected, rtol=1e-11, atol=1e-13, msg=name)


LAYOUTS: dict[int, tuple[dict[str, Any], ...]] = {
    2: ({}, {"scale.ep": 2, "train.microbatch": 1}),
    4: ({}, {"scale.ep": 2}, {"scale.ep": 4}, {"scale.ep": 2, "train.microbatch": 1}),
}


RUNS = {
    "dense, softmax": small_run("dense", loss="softmax"),
    "soft, sigmoid, frozen": small_run("soft", ("image.",), loss="sigmoid"),
    "token choice, softmax": small_run("token_choice", loss="softmax"),
    "token choice, sigmoid, equal": small_run("token_choice", loss="sigmoid", equal_captions="match"),
}


@pytest.mark.smoke
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_workers_train_as_one(workers: int, tmp_path: Path) -> None:
    compared = dict.fromkeys(("loss", "grad_norm", "scale", "text_acc1"), 1e-12)
    compared = {f"train/{name}": error for name, error in compared.items()}
    # The scores of an evaluation are summed in float32.
    compared |= {name: 1e-6 for name in RUNS["dense, softmax"].task.described if name.startswith("val/")}
    cases = {
        name: Case(
            run=override(run, {"task.classes": ("zero", "one", "two", "three")}),
            layouts=LAYOUTS[workers],
            batch=random_batch,
            compared=compared,
            padded=5,
            dtype=torch.float64,
        )
        for name, run in RUNS.items()
    }
    check_ranks_train_as_one(cases, tmp_path, workers)


def test_a_frozen_tower_stays_as_it_is() -> None:
    """Without noise and auxiliary loss, though weights decay and the router is noisy."""
    run = small_run("token_choice", ("image.",))
    run = override(run, {"train.optimizer.weight_decay": 0.5, "model.text.moe": None})
    with default_dtype(torch.float64):
        model = build_model(run, torch.device("cpu"), seed=1)
        before = {name: param.clone() for name, param in model.named_parameters()}
        optimizer, batch = run.train.optimizer.build(model), random_batch()
        metrics = train_step(model, optimizer, batch, run, step=0)
        first = model(batch["image"], keys_B=mix(batch.key, 0)).heads["image"]
        again = model(batch["image"], keys_B=mix(batch.key, 1)).heads["image"]
    assert torch.equal(first, again)
    assert float(metrics["train/loss_router"]) == 0
    changed = {name for name, param in model.named_parameters() if not torch.equal(param, before[name])}
    assert not any(name.startswith("image.") for name in changed)
    assert {"temperature.log_scale_1", "project_text.weight", "text.embed_VD"} <= changed
    assert len(optimizer.state) == sum(not name.startswith("image.") for name in before)


def test_features_stand_for_images() -> None:
    run = small_run("soft")
    with default_dtype(torch.float64):
        model, batch = build_model(run, torch.device("cpu"), seed=1).eval(), random_batch()
        inputs = run.task.inputs(batch)
        features = model.features(batch["image"])
        whole, short = model(inputs).heads, model(inputs._replace(images=features)).heads
    for name, head in whole.items():
        assert torch.equal(short[name], head), name
    assert model(ImageText(None, inputs.tokens)).heads.keys() == {"text", "scale"}


def test_captions_are_drawn_by_the_place_in_the_run() -> None:
    task, batch = small_run().task, random_batch()
    text, tokens = batch["text"], task.inputs(batch).tokens
    assert tokens is not None
    for row in range(BATCH):
        there = [caption for caption in text[row].tolist() if caption[0] >= 0]
        assert tokens[row].tolist() in there
    later = task.inputs(replace(batch, key=batch.key + 1000)).tokens
    assert not torch.equal(tokens, later)
    reversed_ = task.inputs(batch.map(lambda field: field.flip(0))).tokens
    assert torch.equal(reversed_.flip(0), tokens)


def test_learns_one_batch() -> None:
    run, batch = small_run("soft"), random_batch()
    batch = replace(batch, fields={**batch.fields, "image": batch["image"].float()})
    model = build_model(run, torch.device("cpu"), seed=0)
    optimizer = run.train.optimizer.build(model)
    steps = [train_step(model, optimizer, batch, run, step=step) for step in range(20)]
    assert float(steps[0]["train/loss"]) > float(steps[0]["train/loss_of_chance"])
    assert float(steps[-1]["train/loss"]) < 0.1
    assert float(steps[-1]["train/text_acc1"]) == 1


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model.kind": "vit"}, r"reads image, text, scale, and a model of kind 'vit' gives logits: set "),
        ({"task.kind": "classification"}, r"gives image, text, scale: set task.kind=contrastive"),
        ({"task.templates": ("a photo",)}, r"in the place of a class's name, got 'a photo'"),
        ({"task.templates": ()}, "there must be a template"),
        ({"task.classes": ("one", "two", "one")}, "two classes are called 'one'"),
        ({"model.text.vocabulary": 3}, r"vocabulary=3 is less than the tokenizer"),
        ({"train.freeze": ("img.",)}, r"no tensor of the model has a name that begins with 'img\.'"),
        (
            {"model.text.attention": "causal", "model.text.moe.router.kind": "soft"},
            r"is causal, and its router \(soft\) is not",
        ),
    ],
)
def test_refuses(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        override(small_run(), changes)


def test_a_config_reads_on() -> None:
    run = small_run("soft", ("image.",), classes=("one", "two"))
    assert read_config(RunConfig, to_dict(run)) == run
    assert run.task.quality == "val/zero_shot_acc1"
    assert run.task.chance(run.model) == 0.5
    assert isinstance(run.model.build(), TwoTowers)
