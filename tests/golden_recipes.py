"""Golden cases of training recipes: blocks with LayerScale and drop path, and repeated augmentation."""

import numpy as np
import torch
from torch import Tensor

from moe.encoder import Block
from moe.layer import MoEConfig
from moe.models.vit import ViTConfig
from moe.routers import SoftConfig
from moe.routing import RoutingInput
from orchestrator.data.plan import Plan
from tests.golden_report import Arrays, Meta, Report, block_state


def block(z: Arrays, meta: Meta, report: Report) -> None:
    """A block in training, with keys that draw what the file keeps."""
    weights = {name.removeprefix("p/"): array for name, array in z.items() if name.startswith("p/")}
    soft = "phi" in weights
    *_, width, hidden = weights["W1"].shape
    router = SoftConfig(normalize="none", slots_per_expert=weights["phi"].shape[2]) if soft else None
    ours = Block(
        width,
        hidden,
        heads=meta["heads"],
        qk_norm=meta["qk_norm"],
        dropout=0.0,
        moe=MoEConfig(num_experts=len(weights["W1"]), router=router) if router else None,
        index=3,
        drop_path=meta["drop"],
        layer_scale=1.0,
    ).double()
    ours.load_state_dict(block_state(weights, {"phi_DEC": weights["phi"]} if soft else None))
    valid_B, keep_2B = torch.ones(len(z["x"])), torch.stack([z["keep_attention"], z["keep_mlp"]])
    y = ours(z["x"], RoutingInput(valid_B, _keys(ours, keep_2B))).x
    report.close("y", y, z["y"])
    report.close("y - x", y - z["x"], z["y"] - z["x"])


def _keys(ours: Block, keep_2B: Tensor) -> Tensor:
    """The first keys that draw this."""
    drawn_2N = ours.kept(torch.arange(1000))
    if drawn_2N is None:
        return torch.arange(keep_2B.shape[1])
    same_NB = ((drawn_2N[:, :, None] > 0) == keep_2B[:, None, :].bool()).all(0)
    return same_NB.int().argmax(0)


def drop_rates(z: Arrays, meta: Meta, report: Report) -> None:
    for schedule in ("constant", "linear"):
        config = ViTConfig(depth=meta["depth"], drop_path=meta["rate"], drop_path_schedule=schedule)
        report.close(schedule, torch.tensor(config.drop_rates(), dtype=torch.float64), z[schedule])


def repeated(z: Arrays, meta: Meta, report: Report) -> None:
    """Lanes are ranks; the file's permutation is in the place of the plan's."""
    replicas, images = meta["replicas"], len(z["perm"])
    plan = Plan(
        rows=(images,),
        seed=0,
        lanes=replicas,
        batch_size=meta["round_to"],
        shuffle_window=images,
        tail="drop",
        repeats=meta["repeats"],
    )
    report.exact("length", plan.epoch_size // replicas == z["indices"].shape[1])
    lane, index = np.indices(z["indices"].shape)
    sample, view = plan.sample_and_view(lane, index)
    report.exact("indices", torch.equal(z["perm"][sample], z["indices"]))
    report.exact("views", len(np.unique(sample * meta["repeats"] + view)) == sample.size)
