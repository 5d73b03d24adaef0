"""The scales of the papers' sizes: the recipes of Soft MoE, V-MoE and DeiT III.

In sources, ``soft_moe`` is ``vmoe/projects/soft_moe/configs`` of google-research/vmoe, and ``vmoe_paper`` is
``vmoe/configs/vmoe_paper``. ``deit`` is facebookresearch/deit at 7e160fe. Numbers without a source are ours.
"""

from math import log
from typing import Any, cast

from moe.models import ViTConfig
from orchestrator.codec import override
from orchestrator.config import DataConfig, RunConfig, TrainConfig
from orchestrator.data.augment import (
    ColorJitterConfig,
    CutMixConfig,
    InceptionConfig,
    MixupConfig,
    RandAugmentConfig,
    ThreeAugmentConfig,
)
from orchestrator.optimizers import AdamWConfig, LambConfig
from orchestrator.schedules import DeitConfig, LinearConfig, RsqrtConfig
from orchestrator.sweeps.scales import Scale, vit_size
from orchestrator.tasks import ClassificationConfig


def vit_of(run: RunConfig) -> ViTConfig:
    """Returns the model of a run of the papers, which all are of ViTs."""
    return cast(ViTConfig, run.model)


def last_half(run: RunConfig) -> str:
    """Returns the last half of the blocks, where Soft MoE has its experts."""
    return f"last_{vit_of(run).depth // 2}"


_S, _B, _L, _H = (384, 12, 6), (768, 12, 12), (1024, 24, 16), (1280, 32, 16)
VITS = {  # Soft MoE, section 3.3; soft_moe/common.py:199-205
    "S32": vit_size(*_S, 32),
    "S16": vit_size(*_S, 16),
    "S14": vit_size(*_S, 14),
    "S8": vit_size(*_S, 8),
    "B32": vit_size(*_B, 32),
    "B16": vit_size(*_B, 16),
    "L32": vit_size(*_L, 32),
    "L16": vit_size(*_L, 16),
    "H14": vit_size(*_H, 14),
}


def _vits(names: str) -> dict[str, dict[str, Any]]:
    return {name: VITS[name] for name in names.split()}


def _vmoe(model: dict[str, Any], lr: float, *, clip_norm: float | None = None) -> dict[str, Any]:
    """A size of V-MoE, with its tanh layer, and the rate and clipping of that size on JFT-300M."""
    return model | {
        "model.representation_size": model["model.width"],
        "train.lr": lr,
        "train.schedule.end_frac": 1e-5 / lr,  # vmoe_paper/common.py: linear to 1e-5
        "train.clip_norm": clip_norm,
    }


_VMOES = {  # V-MoE; rates, clipping: vmoe_paper/common.py:155; 15B: section 3.6, sizes as moe/presets.py
    "S32": _vmoe(vit_size(512, 8, 8, 32), 1e-3),
    "B32": _vmoe(vit_size(*_B, 32), 8e-4),
    "B16": _vmoe(vit_size(*_B, 16), 8e-4),
    "L32": _vmoe(vit_size(*_L, 32), 6e-4),
    "L16": _vmoe(vit_size(*_L, 16), 4e-4),
    "H14": _vmoe(vit_size(*_H, 14), 3e-4, clip_norm=10.0),
    # Rate, clipping and decay of 15B are those of H/14; its optimizer is that of section 3.6.
    "15B": _vmoe(vit_size(1408, 48, 16, 14), 3e-4, clip_norm=10.0)
    | {
        "model.mlp_dim": 6400,
        "train.optimizer.kind": "adafactor",
        "train.optimizer.weight_decay": 0.1,
        "train.optimizer.decays": "all",
    },
}

_CLASS_TOKEN = {"model.pooling": "token", "model.qk_norm": False}  # V-MoE's ViT
# JFT-300M: Routers in Vision MoE, section 3.2; V-MoE, section 3.2.
_CLASSES_300M = {"model.num_classes": 18_291, "model.head_bias": -log(18_291)}
_JFT_300M = {  # V-MoE on JFT-300M; vmoe_paper/common.py
    **_CLASS_TOKEN,
    **_CLASSES_300M,
    # 14 epochs of 305M images: the exaFLOPs of table 2. The batch is not printed; 4096 is ours.
    "train.steps": 14 * 305_000_000 // 4096,
    "train.schedule.kind": "linear",
    "train.schedule.warmup_steps": 10_000,
    # All parameters decay alike.
    "train.optimizer.weight_decay": 0.1,
    "train.optimizer.decays": "all",
    "train.optimizer.weight_decay_head": None,
    "train.optimizer.weight_decay_scale": 0.0,
}
_ILSVRC2012 = {  # V-MoE-S/32 as released, vmoe_paper/vmoe_s32_last2_ilsvrc2012_randaug_light1.py
    **_CLASS_TOKEN,
    **vit_size(512, 8, 8, 32),
    "model.representation_size": 512,
    "model.head_bias": -log(1_000),
    "data.batch_size": 8192,
    "data.augment.mixup.alpha": 0.2,  # light1
    "data.augment.randaugment.operations": 2,
    "data.augment.randaugment.magnitude": 10,
    "train.steps": 300 * 1_281_167 // 8192,  # 300 epochs
    "train.lr": 3e-3,
    "task.loss": "sigmoid",
    "train.schedule.kind": "linear",
    "train.schedule.warmup_steps": 10_000,
    "train.schedule.end_frac": 1e-5 / 3e-3,
    "train.optimizer.weight_decay": 0.1,  # kernels
}

_EIGHT = {  # experts of the two released V-MoE
    "model.moe.num_experts": 8,
    "model.moe.images_per_group": 8,
    "model.moe.equal_init": True,  # split_rngs = False
    "model.moe.router.kind": "token_choice",
    "model.moe.router.k": 2,
    "model.moe.router.capacity_factor": 1.05,
    # The defaults of the dispatcher, vmoe/moe.py, compute_capacity.
    "model.moe.router.capacity_rounding": "ceil",
    "model.moe.router.capacity_multiple_of": 4,
}
_RELEASED_S32 = _EIGHT | {
    "model.moe.layers": "last_2_odd",
    "model.moe.expert_dropout": 0.2,
    "model.moe.router.eval_capacity_factor": 4.0,
}
_RELEASED_B16 = _EIGHT | {"model.moe.layers": "every_2"}

# Soft MoE's batch, rate, decay of kernels and schedule for 90 epochs of ImageNet instead of 300,000 steps of
# JFT. Ours: steps, warm-up and cooldown, the softmax loss, the head's decay (that of the other kernels), and
# the mixup of 0.2 and two operations of magnitude 10 of V-MoE's `light1`, which is for ImageNet from scratch.
_IN1K = RunConfig(
    model=ViTConfig(),
    data=DataConfig(
        batch_size=4096, augment=(InceptionConfig(), RandAugmentConfig(operations=2), MixupConfig(alpha=0.2))
    ),
    train=TrainConfig(
        steps=28_150,
        lr=1e-3,
        report_every=50,
        eval_every=1_250,
        schedule=RsqrtConfig(warmup_steps=2_500, cooldown_steps=5_000),
    ),
)

# DeiT III on ImageNet at 224 pixels, in which Implicit Bias in Soft MoE trained its ViT-B/16 (section 4 and
# appendix D.2): the command of deit_base_patch16_LS in deit/README_revenge.md, and defaults of deit/main.py.
# Otherwise there: crops of 8 to 100 % of the area, resized bicubically; an average of the weights, which that
# code never evaluates.
_DEIT3 = RunConfig(
    model=ViTConfig(
        pooling="token",  # models_v2.py, with LayerScale 1e-4, without norms of queries and keys
        qk_norm=False,
        gelu="exact",
        layer_scale=1e-4,
        drop_path_schedule="constant",  # models_v2.py
    ),
    task=ClassificationConfig(loss="sigmoid_mean", binarised=True),  # --bce-loss
    data=DataConfig(
        batch_size=2048,  # 256 on each of 8 GPUs
        tail="drop",
        augment=(
            InceptionConfig(),
            ThreeAugmentConfig(),  # --ThreeAugment
            ColorJitterConfig(strength=0.3),
            MixupConfig(alpha=0.8),
            CutMixConfig(alpha=1.0),
        ),
        eval_crop=1.0,  # --eval-crop-ratio 1.0
        eval_interpolation="bicubic",
        repeats=3,  # --repeated-aug
    ),
    train=TrainConfig(
        steps=800 * 625,  # 800 epochs; 625 whole batches of 1,281,167 images
        lr=3e-3,  # --unscale-lr
        report_every=100,
        eval_every=6250,
        schedule=DeitConfig(warmup_steps=5 * 625, epoch_steps=625),
        # --opt fusedlamb --weight-decay 0.05 --opt-eps 1e-8; its optimiser clips at 1.0, the default here
        optimizer=LambConfig(weight_decay=0.05, epsilon=1e-8),
    ),
)


def _deit3(size: dict[str, Any], lr: float, drop_path: float) -> dict[str, Any]:
    return size | {"train.lr": lr, "model.drop_path": drop_path}


# Rates and drop paths: deit/README_revenge.md. DeiT III itself trains B and L at 192 pixels and H at 160, and
# then for 20 epochs at 224.
_DEIT3_SIZES = {
    "S16": _deit3(VITS["S16"], 4e-3, 0.05),
    "B16": _deit3(VITS["B16"], 3e-3, 0.2),
    "L16": _deit3(VITS["L16"], 3e-3, 0.45),
    "H14": _deit3(VITS["H14"], 3e-3, 0.6),
}

# The recipe of the released V-MoE-B/16: vmoe_paper/pretrain_imagenet21k.py.
_IN21K = RunConfig(
    model=ViTConfig(num_classes=21_843, head_bias=-10.0, width=768, heads=12, mlp_dim=3072),
    task=ClassificationConfig(loss="sigmoid"),
    data=DataConfig(
        batch_size=4096,
        augment=(
            InceptionConfig(),
            RandAugmentConfig(operations=2, magnitude=20),
            MixupConfig(alpha=0.5),
        ),
    ),
    train=TrainConfig(
        steps=1_040_000,  # 300 epochs of about 14.2M images
        lr=8e-4,
        report_every=100,
        eval_every=25_000,
        schedule=LinearConfig(warmup_steps=10_000, end_frac=1e-5 / 8e-4),
        optimizer=AdamWConfig(weight_decay=0.1),  # kernels; clipped at 1.0, the default
    ),
)

# Soft MoE, section 3.3 and the caption of table 9: steps, batch, resolution, rsqrt, cooldown. The other
# numbers are those of its released long runs: soft_moe/pretrain_jft4b.py and soft_moe/common.py:93-126.
_JFT = RunConfig(
    model=ViTConfig(num_classes=29_593, head_bias=-log(29_593)),  # pretrain_jft4b.py:31, common.py:201
    task=ClassificationConfig(loss="sigmoid"),  # pretrain_jft4b.py:77
    data=DataConfig(
        batch_size=4096, augment=(InceptionConfig(),)
    ),  # pretrain_jft4b.py:66: crop and flip alone
    train=TrainConfig(
        steps=300_000,
        lr=1e-3,  # common.py:122-126, with warm-up and timescale
        report_every=100,
        eval_every=25_000,
        schedule=RsqrtConfig(warmup_steps=10_000, cooldown_steps=50_000, timescale=10_000),
        # common.py:97-101; clipped at 1.0, the default
        optimizer=AdamWConfig(weight_decay=0.03, weight_decay_head=3.0, weight_decay_scale=0.03),
    ),
)

_RSQRT = {"train.schedule.kind": "rsqrt", "train.schedule.warmup_steps": 10_000}
# The sizes of sweeps that do not vary them, and of those that vary them otherwise than `pareto`.
_BASES = {
    "ablations": VITS["S14"],
    "slots_experts": VITS["S14"],
    "slots": VITS["S16"],
    "moe_layers": VITS["S16"],
    "token_choices": VITS["S16"],
    "choice_experts": VITS["S16"],
    "augmentation": VITS["S16"],
    "softmax_combine": VITS["B32"],
    "expert_count": VITS["B16"],
    "capacity": VITS["L16"],
    "priority": VITS["L16"],
    "last_layers": VITS["L16"],
}
_SIZES_OF = {"routers": _vits("B32 B16 L16"), "long_runs": _vits("S16 S14 B16 L16 H14")}

SCALES = {
    "in1k": Scale(  # 90 epochs of ImageNet
        base=_IN1K,
        sizes=_vits("S32 S16 B32 B16 L16"),
        experts=32,
        bases=_BASES | {"vmoe": _ILSVRC2012},
        sizes_of=_SIZES_OF | {"long_runs": _vits("S16 B16 L16"), "vmoe": {"S32": {}}},
        released={"vmoe": {"S32-last2-8e-released": _RELEASED_S32}},
    ),
    "deit3": Scale(  # 800 epochs of ImageNet
        base=override(_DEIT3, _DEIT3_SIZES["B16"]),
        sizes=_DEIT3_SIZES,
        experts=32,
        bases={
            # Cooldowns need a rate that does not depend on where the run ends.
            "long_runs": {"train.schedule.kind": "rsqrt", "train.schedule.warmup_steps": 5 * 625},
            # As many experts as tokens, and 197 is prime.
            "quickstart": {"model.pooling": "gap"},
            "ablations": {"model.pooling": "gap"},
        },
    ),
    "in21k": Scale(  # 300 epochs of ImageNet-21k
        base=_IN21K,
        sizes=_vits("S32 S16 B32 B16 L16"),
        experts=32,
        # Cooldowns need a rate that does not depend on where the run ends.
        bases=_BASES | {"vmoe": _CLASS_TOKEN, "long_runs": _RSQRT},
        sizes_of=_SIZES_OF | {"long_runs": _vits("S16 B16 L16"), "vmoe": {"B16": {}}},
        released={"vmoe": {"B16-every2-8e-released": _RELEASED_B16}},
    ),
    "jft": Scale(  # the papers' own
        base=_JFT,
        sizes=_vits("S32 B32 S16 B16 L32 S8 L16 H14"),
        experts=32,
        slots=(1, 2, 4, 8, 16),
        bases=_BASES
        | {
            **dict.fromkeys(("capacity", "priority", "last_layers"), _JFT_300M | _VMOES["L16"]),
            "routers": _CLASSES_300M,
            "softmax_combine": VITS["B32"] | _CLASSES_300M,
            "long_runs": {"train.steps": 4_000_000},
            "vmoe": _JFT_300M,
        },
        sizes_of=_SIZES_OF | {"vmoe": _VMOES, "normalization": _vits("S16 B16 L16 H14")},
    ),
}
