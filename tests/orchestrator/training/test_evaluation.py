"""The evaluation while training: against torch's own mean, of the model in evaluation mode, and its times."""

import pytest
import torch
import torch.nn.functional as F

from moe.models.vit import ViT
from orchestrator.data.batch import Batch, normalize
from orchestrator.training import loop
from orchestrator.training.loop import evaluate
from tests.orchestrator.training.test_loop import EVERY_ROUTER, live_model, random_batch, small_run


def plain_evaluation(model: ViT, batches: list[Batch], *, training: bool = False) -> tuple[float, float]:
    before = model.training
    model.train(training)
    with torch.no_grad():
        # groups never cross batches
        logits = [model(normalize(b["image"]), b.valid).logits.double()[b.valid.bool()] for b in batches]
    model.train(before)
    labels = torch.cat([batch["label"][:, 0][batch.valid.bool()] for batch in batches])
    logits = torch.cat(logits)
    return (logits.argmax(-1) == labels).double().mean().item(), F.cross_entropy(logits, labels).item()


@EVERY_ROUTER
@pytest.mark.parametrize(("microbatch", "valid"), [(None, 8), (None, 1), (2, 5), (2, 4)])
def test_evaluation_is_the_mean_over_valid_images(router: str, microbatch: int | None, valid: int) -> None:
    run = small_run(router, **{"train.microbatch": microbatch})
    model = live_model(run)
    batches = [random_batch(8, 0), random_batch(8, 1), random_batch(8, 2, valid=valid)]
    metrics = evaluate(model, batches, run)
    accuracy, loss = plain_evaluation(model, batches)
    assert metrics["val/acc1"] == pytest.approx(accuracy, abs=1e-6)
    assert metrics["val/loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["perf/ms_per_image"] > 0
    assert metrics.keys() == {"val/acc1", "val/loss", "perf/ms_per_image"}
    assert model.training
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("router", ["token_choice", "expert_choice"])
def test_the_model_is_evaluated_in_evaluation_mode(router: str) -> None:
    """With the capacity of evaluation, which is that of training in no other test here."""
    capacities = {"capacity_factor": 0.3, "eval_capacity_factor": 2.0}
    run = small_run(router, **{f"model.moe.router.{name}": value for name, value in capacities.items()})
    model, batches = live_model(run), [random_batch(8)]
    found = evaluate(model, batches, run)["val/loss"]
    assert found == pytest.approx(plain_evaluation(model, batches)[1], rel=1e-5)
    assert found != pytest.approx(plain_evaluation(model, batches, training=True)[1], rel=1e-2)


@EVERY_ROUTER
def test_padding_does_not_matter(router: str) -> None:
    """Neither the pixels of invalid images nor their number change anything."""
    run = small_run(router)
    model = live_model(run)
    black, noise = random_batch(8, 0, valid=3), random_batch(8, 0, valid=3)
    black["image"][3:] = 0
    noise["label"][:, 0][3:] = 9 - noise["label"][:, 0][3:]
    short = black.map(lambda field: field[:4])
    losses = [evaluate(model, [batch], run)["val/loss"] for batch in (black, noise, short)]
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-5)


def test_padding_takes_no_capacity() -> None:
    """A pair of padding and an image has the seats of a pair: it is one image alone with twice the capacity.

    The padding comes first here, where seats are given away.
    """
    tight = {"model.moe.num_experts": 2, "model.moe.router.k": 1}
    factor = "model.moe.router.capacity_factor"
    run = small_run("token_choice", **tight, **{factor: 0.5})
    alone = small_run("token_choice", **tight, **{factor: 1.0, "model.moe.images_per_group": 1})
    assert run.model.slots() == alone.model.slots()
    model, single = live_model(run), live_model(alone)
    image = random_batch(1, 3)
    pair = image.map(lambda field: torch.cat([field, field]))  # both would want the same seats
    pair.valid[0] = 0
    expected = evaluate(single, [image], alone)["val/loss"]
    assert evaluate(model, [pair], run)["val/loss"] == pytest.approx(expected, rel=1e-5)
    pair.valid[0] = 1
    assert evaluate(model, [pair], run)["val/loss"] != pytest.approx(expected, rel=1e-3)


def test_times_are_taken_on_one_thread() -> None:
    """The median over five passes after two others; the rest of the validation uses all threads."""
    run, seen = small_run(), list[int]()
    model = live_model(run)
    model.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        values = evaluate(model, [random_batch(8, seed) for seed in range(9)], run)
    finally:
        torch.set_num_threads(before)
    assert seen == [2] * 2 + [1] * 5 + [2] * 2
    assert values["perf/ms_per_image"] > 0


@pytest.mark.parametrize(("passes", "run_in_all"), [(1, 3), (2, 3), (3, 3), (9, 9)])
def test_the_time_of_a_forward_pass_has_no_warm_up(
    passes: int, run_in_all: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two passes take as long as a compilation; an evaluation of fewer than three repeats its last
    pass, which changes no other metric."""
    run, now, calls = small_run(), [0.0], list[int]()
    model = live_model(run)
    batches = [random_batch(8, seed) for seed in range(passes)]
    expected = plain_evaluation(model, batches)

    def take_time(*_: object) -> None:
        calls.append(len(calls))
        now[0] += 100.0 if len(calls) <= 2 else 0.008

    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])
    model.register_forward_pre_hook(take_time)
    values = evaluate(model, batches, run)
    assert len(calls) == run_in_all
    assert values["perf/ms_per_image"] == pytest.approx(1.0)
    assert (values["val/acc1"], values["val/loss"]) == pytest.approx(expected, rel=1e-4)
