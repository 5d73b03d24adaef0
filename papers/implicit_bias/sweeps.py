"""The sweeps of Implicit Bias in Soft MoE (Chung et al. 2024)."""

from typing import cast

from orchestrator.sweeps.arms import MOE, moe, named
from orchestrator.sweeps.scales import CIFAR, TINY, Scale
from orchestrator.sweeps.sweep import Sweep
from papers.implicit_bias.astroformer import AstroformerConfig
from papers.scales import last_half, vit_of

_TINY_ASTROFORMER = {
    "model.kind": "astroformer",
    "model.image_size": 16,  # digits of twice their size, for four tokens
    "model.num_classes": 10,
    "model.stages": "CT",
    "model.widths": (16, 32),
    "model.depths": (1, 2),
    "model.stem_width": 16,
    "model.head_dim": 16,
    "model.dropout": 0.1,
    "task.smoothing": 0.1,
}
# Implicit Bias in Soft MoE, appendix D.2 and table 7: smoothing, dropout, cosine, AdamW and 500 epochs; other
# numbers are those of Astroformer's command for CIFAR and timm's defaults, but for crops of 5 instead of 8 %
# of the area and more, and a warm-up from 0 instead of 1e-5. The paper's size of images, batch and rate are
# not readable: 96 pixels and a batch of 256 are ours, and the rate is Astroformer's there.
_CIFAR_ASTROFORMER = {
    "model.kind": "astroformer",
    "model.image_size": 96,
    "model.num_classes": 10,
    "model.dropout": 0.1,
    "task.smoothing": 0.1,
    "data.batch_size": 256,
    "data.augment.randaugment": None,
    "data.augment.color_jitter.strength": 0.4,
    "data.augment.mixup.alpha": 0.8,
    "data.eval_crop": 0.95,
    "data.eval_interpolation": "bicubic",
    "train.steps": 97_656,
    "train.eval_every": 977,  # 5 epochs
    "train.lr": 2e-5,  # x sqrt(batch / 256)
    "train.clip_norm": None,
    "train.schedule.kind": "cosine",
    "train.schedule.warmup_steps": 977,
    "train.optimizer.weight_decay": 2e-5,
}

TINY.add("expert_count_cifar", base=_TINY_ASTROFORMER)
CIFAR.add("expert_count_cifar", base=_CIFAR_ASTROFORMER)


@named()
def expert_count(scale: Scale) -> Sweep:
    """Many small experts or few large ones: the same parameters in all, one slot per expert.

    Source: Implicit Bias in Soft MoE, section 4 and appendix D: n experts in the last half of ViT-B/16 whose
    hidden layers add up to the same number, that of 16 dense MLPs (513M parameters). The numbers n of that
    model are not readable; those here are ours, and hold the 2, 8, 16, 64, 128 printed for CIFAR100, and the
    one huge expert of section 3.
    """
    model = vit_of(scale.base)
    total = model.mlp_dim * scale.experts // 2  # hidden units of all experts of a layer
    counts = [2**i for i in range(8) if 2**i <= 4 * scale.experts and total % 2**i == 0]
    layers = last_half(scale.base)
    arms = {
        f"n{n}": moe("soft", n, layers=layers, slots_per_expert=1) | {f"{MOE}.expert_dim": total // n}
        for n in counts
    }
    return Sweep(base=scale.base, arms=arms)


@named(has_own_model=True)
def expert_count_cifar(scale: Scale) -> Sweep:
    """Many small experts or few large ones, in the two blocks of attention that end an Astroformer.

    Source: Implicit Bias in Soft MoE, section 4.4.1 and appendix D.2: n experts of one slot in place of the
    MLPs of Astroformer-1, without the skip connection around them. All together have the hidden units of 16
    MLPs, 49,152.
    """
    model = cast(AstroformerConfig, scale.base.model)
    total = 16 * 4 * model.widths[-1]
    return Sweep(
        base=scale.base,
        arms={
            f"n{n}": moe("soft", n, layers=f"last_{model.depths[-1]}", slots_per_expert=1)
            | {f"{MOE}.expert_dim": total // n, f"{MOE}.residual": False}
            for n in (2, 8, 16, 64, 128)
        },
    )
