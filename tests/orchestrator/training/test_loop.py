"""The step and the loop, on random images and without files."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe.models.vit import ViT
from orchestrator.checkpoint.manager import NotFiniteError
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch, normalize
from orchestrator.runs.metrics_file import Metrics
from orchestrator.training import loop
from orchestrator.training.loop import Diverged, run_steps, train_step
from orchestrator.training.metrics import Meter
from orchestrator.training.profile import phase_seconds
from tests.orchestrator.training.batches import make_batch

ROUTERS: dict[str, dict[str, Any]] = {
    "dense": {},
    "soft": {"model.moe.router.kind": "soft", "model.moe.router.slots_per_expert": 2},
    "token_choice": {
        "model.moe.router.kind": "token_choice",
        "model.moe.router.k": 2,  # first choices of padding would come before second ones of images
        "model.moe.images_per_group": 2,
    },
    "expert_choice": {"model.moe.router.kind": "expert_choice", "model.moe.images_per_group": 2},
}
EVERY_ROUTER = pytest.mark.parametrize("router", ROUTERS)


def small_run(router: str = "dense", **changes: Any) -> RunConfig:
    small = {"model.width": 16, "model.mlp_dim": 32, "data.batch_size": 8, "train.steps": 20}
    return override(RunConfig(), small | ROUTERS[router] | changes)


def random_batch(size: int, seed: int = 0, *, valid: int | None = None) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    image = torch.randint(256, (size, 3, 8, 8), generator=rng, dtype=torch.uint8)
    label = torch.randint(10, (size,), generator=rng)
    return make_batch(image, label, valid=valid)


def live_model(run: RunConfig, dtype: torch.dtype = torch.float32) -> ViT:
    """Returns a model whose head is not zero as at the start, so that logits depend on every block."""
    model = ViT(run.model, seed=1)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(2))
    model.to(dtype)
    model.register_forward_pre_hook(lambda _, inputs: tuple(x.to(dtype) for x in inputs))
    return model


Log = list[tuple[str, int]]


def run_loop(
    run: RunConfig,
    *,
    start: int = 0,
    until: int | None = None,
    model: ViT | None = None,
    calls: Log | None = None,
    validate: Callable[[], Metrics] | None = None,
) -> tuple[Log, list[Metrics]]:
    """Returns the loop's calls in order, and every report."""
    calls = [] if calls is None else calls
    reports: list[Metrics] = []
    model = model or ViT(run.model)
    until = until or run.train.steps

    def report(step: int, metrics: Metrics) -> None:
        calls.append(("report", step))
        reports.append(metrics)

    def validated() -> Metrics:
        calls.append(("validate", -1))
        return validate() if validate else {"val/acc1": 0.5}

    run_steps(
        model,
        run.train.optimizer.build(model),
        (random_batch(run.data.batch_size, seed) for seed in range(start, run.train.steps)),
        run,
        Meter(),
        start=start,
        until=until,
        report=report,
        validate=validated,
        save=lambda step: calls.append(("save", step)),
    )
    return calls, reports


@EVERY_ROUTER
def test_learns_one_batch(router: str) -> None:
    run = small_run(router, **{"train.steps": 60, "train.lr": 1e-2, "train.schedule.warmup_steps": 5})
    model = ViT(run.model)
    optimizer = run.train.optimizer.build(model)
    batch = random_batch(8)
    steps = [train_step(model, optimizer, batch, run, step=step) for step in range(60)]
    first = steps[0]["train/loss_class"].item()
    assert first == pytest.approx(2.302585, abs=1e-5)  # log 10: the head is zero
    assert steps[-1]["train/loss_class"].item() < 0.1
    assert steps[-1]["train/acc1"].item() == 1
    for metrics in steps:
        whole = metrics["train/loss_class"] + metrics["train/loss_router"]
        torch.testing.assert_close(metrics["train/loss"], whole)


@pytest.mark.parametrize(
    ("changes", "reported", "validated", "saved"),
    [
        ({"train.report_every": 4}, [4, 8, 10], [10], [*range(1, 11)]),
        ({"train.report_every": 5, "train.eval_every": 4}, [4, 5, 8, 10], [4, 8, 10], [*range(1, 11)]),
        ({"train.report_every": 100, "checkpoint.every": 3}, [10], [10], [3, 6, 9, 10]),
        ({"train.report_every": 1, "checkpoint.every": 100}, [*range(1, 11)], [10], [10]),
        ({"train.steps": 25, "train.report_every": 100}, [25], [25], [*range(3, 25, 3), 25]),
    ],
)
def test_when_it_reports_validates_and_saves(
    changes: dict[str, int], reported: list[int], validated: list[int], saved: list[int]
) -> None:
    run = small_run(**{"train.steps": 10, **changes})
    calls, reports = run_loop(run)
    assert [step for what, step in calls if what == "report"] == reported
    assert [step for what, step in calls if what == "save"] == saved
    with_validation = [step for step, metrics in zip(reported, reports, strict=True) if "val/acc1" in metrics]
    assert with_validation == validated
    assert [what for what, _ in calls].count("validate") == len(validated)
    assert calls[-1][0] == "save"  # what it reported is in the checkpoint


def test_resumes_and_pauses_at_any_step() -> None:
    changes = {"train.steps": 10, "train.report_every": 3, "checkpoint.every": 4}
    calls, reports = run_loop(small_run(**changes), start=7)
    assert calls == [("save", 8), ("report", 9), ("validate", -1), ("report", 10), ("save", 10)]
    assert reports[0]["train/lr"] == pytest.approx(1e-3, rel=1e-3)  # update 8 is before the cooldown
    assert run_loop(small_run(**changes), until=2)[0] == [("save", 2)]
    assert run_loop(small_run(**changes), until=3)[0] == [("report", 3), ("save", 3)]


def test_it_saves_where_it_ends_early() -> None:
    changes = {"train.steps": 10, "train.eval_every": 4, "train.report_every": 100, "checkpoint.every": 100}
    calls, _ = run_loop(small_run(**changes, **{"train.stop_at": 0.5}))
    assert calls == [("validate", -1), ("report", 4), ("save", 4)]


def test_evaluations_reports_and_saves_are_no_time_of_training() -> None:
    """And only where something is due does the loop wait for the device."""
    run = small_run(
        **{"train.steps": 4, "train.report_every": 2, "train.eval_every": 4, "checkpoint.every": 3}
    )
    during = list[tuple[str, bool]]()

    class Watched(Meter):
        is_paused = False

        @contextmanager
        def paused(self) -> Iterator[None]:
            during.append(("pause", False))
            self.is_paused = True
            with super().paused():
                yield
            self.is_paused = False

    meter, model = Watched(), ViT(run.model)

    def noted(what: str) -> None:
        during.append((what, meter.is_paused))

    run_steps(
        model,
        run.train.optimizer.build(model),
        (random_batch(8, seed) for seed in range(4)),
        run,
        meter,
        start=0,
        until=4,
        report=lambda step, metrics: noted("report"),
        validate=lambda: noted("validate") or {},
        save=lambda step: noted("save"),
    )
    pause = ("pause", False)
    last = [pause, ("validate", True), ("report", True), ("save", True)]
    assert during == [pause, ("report", True), pause, ("save", True), *last]


def test_a_report_has_the_time_of_each_phase_since_the_report_before() -> None:
    every_second = {"train.report_every": 2, "train.eval_every": 2, "checkpoint.every": 2}
    phase_seconds()  # of other tests
    _, (first, second) = run_loop(small_run(**{"train.steps": 4, **every_second}))
    steps = {"perf/forward_s", "perf/backward_s", "perf/optimizer_s"}
    assert steps <= first.keys() & second.keys()
    assert second.keys() - first.keys() == {"perf/evaluate_s", "perf/report_s", "perf/checkpoint_s"}


def test_what_it_reports() -> None:
    run = small_run("token_choice", **{"train.steps": 2})
    _, (metrics,) = run_loop(run)
    assert {name.split("/")[0] for name in metrics} == {"train", "moe", "perf", "data", "cost", "val"}
    assert all(isinstance(value, float) for value in metrics.values())
    assert {"train/loss", "train/loss_class", "train/loss_router", "train/acc1"} < metrics.keys()
    assert {"train/grad_norm", "train/lr", "moe/dropped_frac", "moe/load_cv"} < metrics.keys()


@EVERY_ROUTER
def test_microbatches_change_nothing(router: str) -> None:
    """In float64: losses, gradient norms, statistics and the weights after four updates."""

    def trained(size: int | None) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
        run = small_run(router, **{"train.microbatch": size, "train.schedule.warmup_steps": 0})
        model = live_model(run, torch.float64)
        optimizer = run.train.optimizer.build(model)
        metrics = [train_step(model, optimizer, random_batch(8, n), run, step=n) for n in range(4)]
        return metrics, [param.detach() for param in model.parameters()]

    whole, parts = trained(None), trained(2)
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-9)
    for name in ("train/loss", "train/loss_class", "train/grad_norm"):
        exact = [step[name].item() for step in whole[0]]
        assert [step[name].item() for step in parts[0]] == pytest.approx(exact, rel=1e-6), name


def test_the_gradient_is_of_the_mean_over_the_batch() -> None:
    """One SGD step against torch's own mean, with clipping that does bind."""
    changes = {"train.optimizer.kind": "sgd", "train.optimizer.momentum": 0, "train.clip_norm": 0.5}
    run = small_run(**changes, **{"train.microbatch": 2, "train.schedule.warmup_steps": 0, "train.lr": 0.1})
    model, plain = live_model(run), live_model(run)
    batch = random_batch(8)
    metrics = train_step(model, run.train.optimizer.build(model), batch, run, step=0)
    loss = F.cross_entropy(plain(normalize(batch["image"])).logits, batch["label"][:, 0])
    loss.backward()
    grads = [param.grad for param in plain.parameters()]
    norm = torch.stack([grad.norm() for grad in grads if grad is not None]).norm()
    assert norm > 0.5
    torch.testing.assert_close(metrics["train/grad_norm"], norm)
    torch.testing.assert_close(metrics["train/loss"], loss.detach())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert theirs.grad is not None
        torch.testing.assert_close(ours.detach(), theirs.detach() - 0.1 * 0.5 / norm * theirs.grad)


def test_the_state_of_routers_follows_the_steps() -> None:
    """The temperature is that of the step, and the bias follows the choices of its batch alone."""
    router = "model.moe.router."
    cooling = {"kind": "mixture", "temperature": 2.0, "temperature_decay": 0.5}
    counting = {"kind": "top_k", "k": 1, "balance.kind": "sign", "balance.rate": 0.1}
    found = dict[str, Tensor]()
    for fields in (cooling, counting):
        run = small_run(**{f"{router}{name}": value for name, value in fields.items()})
        model = live_model(run)
        train_step(model, run.train.optimizer.build(model), random_batch(8), run, step=2)
        found |= {name.rpartition(".")[2]: buffer for name, buffer in model.named_buffers()}
    assert found["temperature"].item() == 0.5
    assert found["bias_E"].abs().max() > 0.05
    assert not found["counts"].any()


def test_router_noise_depends_on_the_seed() -> None:
    def loss(seed: int) -> float:
        run = small_run("token_choice", **{"train.seed": seed})
        model = live_model(run)
        optimizer = run.train.optimizer.build(model)
        return train_step(model, optimizer, random_batch(8), run, step=0)["train/loss"].item()

    assert loss(0) == loss(0) != loss(1)


def test_divergence_is_reported_and_ends_it() -> None:
    """The loss is named, whatever an evaluation there says."""
    run = small_run(**{"train.steps": 10, "train.eval_every": 3, "checkpoint.every": 10})
    model, calls = ViT(run.model), list[tuple[str, int]]()
    torch.nn.init.constant_(model.head.bias, float("inf"))
    with pytest.raises(Diverged, match=r"train/loss is nan at step 3"):
        run_loop(run, model=model, calls=calls, validate=lambda: {"val/not_finite": 8.0})
    assert calls == [("validate", -1), ("report", 3)]


def test_a_validation_whose_outputs_are_not_finite_is_a_divergence() -> None:
    """It reports no numbers of the model, and nothing is saved. Padding may be anything."""
    run, calls = small_run(**{"train.steps": 4, "train.eval_every": 2}), list[tuple[str, int]]()
    model = ViT(run.model)
    model.head.register_forward_hook(lambda head, _, logits: logits if head.training else logits / 0)
    batches = [random_batch(8, valid=5), random_batch(8, valid=0)]
    with pytest.raises(Diverged, match="the outputs of 5 validation images are not finite at step 2"):
        run_loop(run, model=model, calls=calls, validate=lambda: loop.evaluate(model, batches, run))
    assert calls[-2:] == [("validate", -1), ("report", 2)]
    found = loop.evaluate(model, batches, run)
    assert {n for n, value in found.items() if value == value} == {"val/not_finite", "perf/ms_per_image"}
    assert "val/not_finite" not in loop.evaluate(model, batches[1:], run)


@pytest.mark.parametrize(("at", "until"), [(2, None), (4, None), (2, 2)])
def test_a_gradient_norm_that_overflows_is_a_divergence(at: int, until: int | None) -> None:
    """Also at a pause between two reports: clipping makes such gradients zero, and nothing is learned."""
    run, calls = small_run(**{"train.steps": 10, "train.report_every": 4}), list[tuple[str, int]]()
    model, passes = ViT(run.model), count(1)
    model.head.weight.register_hook(lambda grad: torch.full_like(grad, 1e30) if next(passes) == at else grad)
    with pytest.raises(Diverged, match=r"train/grad_norm is inf, at step 4 or since the report before it"):
        run_loop(override(run, {"checkpoint.every": 8}), model=model, calls=calls, until=until)
    assert calls == [("report", 4)]


@pytest.mark.parametrize("report_every", [2, 100])
def test_a_loss_that_is_not_finite_is_never_saved(report_every: int) -> None:
    """Its step is reported, whatever the intervals are."""
    changes = {"train.steps": 10, "train.report_every": report_every, "checkpoint.every": 2}
    run, model, calls = small_run(**changes), ViT(small_run().model), list[tuple[str, int]]()
    torch.nn.init.constant_(model.head.bias, float("inf"))
    with pytest.raises(Diverged, match=r"train/loss is nan at step 2"):
        run_loop(run, model=model, calls=calls)
    assert calls == [("report", 2)]


@pytest.mark.parametrize("report_every", [2, 100])
def test_a_state_that_is_not_finite_ends_the_run(report_every: int) -> None:
    """The step's own loss, from the weights before the update, is finite."""
    run = small_run(**{"train.steps": 10, "train.report_every": report_every, "checkpoint.every": 2})
    model, steps, reports = ViT(run.model), list[int](), list[Metrics]()

    def report(step: int, metrics: Metrics) -> None:
        steps.append(step)
        reports.append(metrics)

    def save(step: int) -> None:
        raise NotFiniteError("head.bias hold numbers that are not finite")

    with pytest.raises(Diverged, match=r"head.bias hold numbers that are not finite at step 2"):
        run_steps(
            model,
            run.train.optimizer.build(model),
            (random_batch(8, seed) for seed in range(10)),
            run,
            Meter(),
            start=0,
            until=10,
            report=report,
            validate=dict,
            save=save,
        )
    assert steps == [2]
    assert 0 < reports[0]["train/loss"] < 10


def test_a_report_waits_for_one_copy_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are stacked where they are, and copied to the host together. Fake tensors need no GPU."""
    with FakeTensorMode():
        metrics = {name: torch.empty((), device="cuda", dtype=dtype) for name, dtype in DTYPES.items()}
    monkeypatch.setattr(loop, "sum_over_ranks", lambda values: torch.arange(len(values)))
    with CopiesToHost() as copies:
        assert loop._sum_over_workers(metrics) == {"a": 0, "b": 1, "c": 2}
    assert copies.shapes == [(3,)]


DTYPES = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float64}


class CopiesToHost(TorchDispatchMode):
    """Records the shapes of tensors that are copied from a GPU to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        from_gpu = bool(args) and isinstance(args[0], Tensor) and args[0].is_cuda
        if from_gpu and isinstance(output, Tensor) and output.device.type == "cpu":
            self.shapes.append(tuple(output.shape))
        return output
