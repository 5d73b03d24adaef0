"""One implementation in its own process, asked for one timing at a time: ours, its peers, plain bmm.

  python -m bench.peers JOB    JOB: the JSON of a `Job`; `bench/layers.py` starts it

Processes, because glibc reads its allocator settings at their start. Every line on stdin is answered by the
CPU seconds of a forward, of a training step (forward and backward) and of a matmul, as JSON.

Made comparable: every expert is Linear-GELU-Linear (st-moe-pytorch ships GEGLU, mixture-of-experts ReLU),
every second choice is routed, and the least capacity is 1 (both ship 4, which would compute 2-4 times the
slots here). mixture-of-experts has no biases in its experts. The peers take the exact GELU, as they ship.
tutel is missing: it is not on PyPI.
"""

import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.layer import MoEConfig, MoELayer
from moe.models.vit import ViT, ViTConfig
from moe.routers import ExpertChoiceConfig, RouterConfig, SoftConfig, TokenChoiceConfig

DIM, HIDDEN, TOKENS, SLOTS = 384, 1536, 196, 256  # BASELINES.md, A3
MODEL_EXPERTS = 128
GEMM, GEMMS = 1024, 9
PEER_CAPACITY = SLOTS / TOKENS + 1e-6  # they round down
WARM_UP = 4  # steps until a heap that keeps its pages has them all


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement, in a process of its own.

    router: soft, token_choice, expert_choice, or model for Soft MoE S/16 as a whole.
    keep_memory: as our training workers do, whoever is timed.
    """

    implementation: str
    router: str
    experts: int
    dtype: str
    images: int
    keep_memory: bool


class OurLayer(nn.Module):
    def __init__(self, router: RouterConfig, experts: int) -> None:
        super().__init__()
        self.layer = MoELayer(MoEConfig(num_experts=experts, router=router), dim=DIM, hidden=HIDDEN)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.layer(x_BSD)


class OurModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        moe = MoEConfig(layers="last_6", num_experts=MODEL_EXPERTS, router=SoftConfig())
        self.model = ViT(ViTConfig(moe=moe))

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).logits


class PlainSoft(nn.Module):
    """Soft MoE as algorithms 1 and 2 of its paper write it, over plain bmm."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.phi_DEC = nn.Parameter(torch.randn(DIM, experts, SLOTS // experts) * (DIM * experts) ** -0.5)
        self.scale = nn.Parameter(torch.ones(1))
        self.w_in_EDF = nn.Parameter(torch.empty(experts, DIM, HIDDEN).uniform_(-0.05, 0.05))
        self.b_in_EF = nn.Parameter(torch.zeros(experts, HIDDEN))
        self.w_out_EFD = nn.Parameter(torch.empty(experts, HIDDEN, DIM).uniform_(-0.05, 0.05))
        self.b_out_ED = nn.Parameter(torch.zeros(experts, DIM))

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.einsum("bmd,dnp->bmnp", _unit(x, 2), self.scale * _unit(self.phi_DEC, 0))
        dispatch, combine = logits.softmax(1), logits.flatten(2).softmax(2).view_as(logits)
        slots = torch.einsum("bmd,bmnp->nbpd", x, dispatch).flatten(1, 2)
        hidden = F.gelu(torch.bmm(slots, self.w_in_EDF) + self.b_in_EF[:, None], approximate="tanh")
        outputs = torch.bmm(hidden, self.w_out_EFD) + self.b_out_ED[:, None]
        return torch.einsum("nbpd,bmnp->bmd", outputs.unflatten(1, (len(x), -1)), combine)


def _unit(x: Tensor, dim: int) -> Tensor:
    return x / (x.square().sum(dim, keepdim=True) + 1e-6).sqrt()


class FirstOutput(nn.Module):
    """The peers return their auxiliary losses too."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def bwconrad(experts: int) -> nn.Module:
    wrapper = importlib.import_module("soft_moe").SoftMoELayerWrapper
    mlp = importlib.import_module("timm.layers").Mlp
    return wrapper(DIM, experts, SLOTS // experts, mlp, in_features=DIM, hidden_features=HIDDEN)


def lucidrains(experts: int, slots: int = SLOTS) -> nn.Module:
    soft = importlib.import_module("soft_moe_pytorch").SoftMoE
    return soft(DIM, num_experts=experts, num_slots=slots // experts)


def st_moe(experts: int) -> nn.Module:
    package = importlib.import_module("st_moe_pytorch.st_moe_pytorch")
    vars(package)["MIN_EXPERT_CAPACITY"] = 1
    layer = package.MoE(
        DIM,
        num_experts=experts,
        gating_top_n=2,
        threshold_train=0.0,
        threshold_eval=0.0,
        capacity_factor_train=PEER_CAPACITY,
        capacity_factor_eval=PEER_CAPACITY,
        experts=nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM)) for _ in range(experts)
        ),
    )
    return FirstOutput(layer)


def mixture_of_experts(experts: int) -> nn.Module:
    package = importlib.import_module("mixture_of_experts.mixture_of_experts")
    vars(package)["MIN_EXPERT_CAPACITY"] = 1
    layer = package.MoE(
        DIM,
        num_experts=experts,
        hidden_dim=HIDDEN,
        activation=nn.GELU,
        second_policy_train="all",
        second_policy_eval="all",
        capacity_factor_train=PEER_CAPACITY,
        capacity_factor_eval=PEER_CAPACITY,
    )
    return FirstOutput(layer)


def lucidrains_model() -> nn.Module:
    model = timm_dense()
    for block in list(model.blocks)[6:]:  # pyright: ignore[reportArgumentType]  # timm's blocks are a Sequential
        block.mlp = lucidrains(MODEL_EXPERTS, slots=MODEL_EXPERTS)
    return model


def timm_dense() -> nn.Module:
    return importlib.import_module("timm").create_model("vit_small_patch16_224")


BUILDERS: dict[tuple[str, str], Callable[[int], nn.Module]] = {
    ("soft", "ours"): lambda experts: OurLayer(SoftConfig(slots_per_expert=SLOTS // experts), experts),
    ("soft", "soft-moe"): bwconrad,
    ("soft", "soft-moe-pytorch"): lucidrains,
    ("soft", "bmm"): PlainSoft,
    ("token_choice", "ours"): lambda experts: OurLayer(
        TokenChoiceConfig(k=2, capacity_factor=SLOTS / TOKENS / 2), experts
    ),
    ("token_choice", "st-moe-pytorch"): st_moe,
    ("token_choice", "mixture-of-experts"): mixture_of_experts,
    ("expert_choice", "ours"): lambda experts: OurLayer(
        ExpertChoiceConfig(capacity_factor=SLOTS / TOKENS), experts
    ),
    ("model", "ours"): lambda _: OurModel(),
    ("model", "soft-moe"): lambda _: importlib.import_module(
        "soft_moe.vision_transformer"
    ).soft_moe_vit_small(),
    ("model", "soft-moe-pytorch"): lambda _: lucidrains_model(),
    ("model", "timm dense"): lambda _: timm_dense(),
}


def check_against_plain() -> None:
    """Our Soft layer and the literal one agree in outputs and gradients, given the same weights."""
    torch.manual_seed(0)
    plain, ours = PlainSoft(8), OurLayer(SoftConfig(slots_per_expert=SLOTS // 8), 8)
    theirs, our = dict(plain.named_parameters()), dict(ours.named_parameters())
    names = {name: f"layer.router.{name}" for name in ("phi_DEC", "scale")}
    names |= {name: f"layer.experts.{name}" for name in ("w_in_EDF", "b_in_EF", "w_out_EFD", "b_out_ED")}
    with torch.no_grad():
        for name, ours_name in names.items():
            our[ours_name].copy_(theirs[name])
    x = torch.randn(2, TOKENS, DIM)
    weight = torch.randn_like(x)
    expected, got = plain(x), ours(x)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)
    (expected * weight).sum().backward()
    (got * weight).sum().backward()
    for name, ours_name in names.items():
        torch.testing.assert_close(our[ours_name].grad, theirs[name].grad, atol=1e-4, rtol=1e-3)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if job.keep_memory:
        # Here, so that the builders need no more than torch.
        importlib.import_module("orchestrator.training.worker").keep_freed_memory()
    dtype = getattr(torch, job.dtype)
    module = BUILDERS[job.router, job.implementation](job.experts).to(dtype)
    if job.implementation == "ours":
        check_against_plain()
    shape = (3, 224, 224) if job.router == "model" else (TOKENS, DIM)
    x = torch.randn(job.images, *shape, dtype=dtype, requires_grad=job.router != "model")
    a, b = torch.randn(2, GEMM, GEMM, dtype=dtype)

    def forward() -> None:
        with torch.no_grad():
            module(x)

    def train() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x).sum().backward()

    timed = {"forward": (forward, 1), "train": (train, 1), "gemm": (lambda: a @ b, GEMMS)}
    for step in (forward, *[train] * WARM_UP, forward):
        step()
    print(json.dumps({"ready": job.implementation}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({name: cpu_seconds(*what) for name, what in timed.items()}), flush=True)


def cpu_seconds(step: Callable[[], object], repeats: int) -> float:
    """Median over `repeats`; of the process, so that neighbours on the machine cost nothing but cache."""
    seconds = []
    for _ in range(repeats):
        began = time.process_time()
        step()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
