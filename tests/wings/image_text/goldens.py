"""Golden cases of image and text: losses over a batch, steps with a frozen tower, zero-shot, retrieval."""

from typing import Literal

import torch
from torch import Tensor, nn

from moe.parallel import update
from tests.golden_report import Arrays, Meta, Report
from wings.image_text.contrastive import Pairs, pair_losses
from wings.image_text.retrieval import image_ranks, recalls, text_ranks
from wings.image_text.zero_shot import class_weights, unit

Loss = Literal["softmax", "sigmoid"]
TIGHT = 1e-9


def contrastive(z: Arrays, meta: Meta, report: Report) -> None:
    """The loss, its gradients at the towers' outputs, the factor and the bias, and each shard's share."""
    kind: Loss = "softmax" if meta["kind"] == "softmax_loss" else "sigmoid"
    names = [name for name in ("z_img", "z_txt", "log_scale", "bias") if name in z]
    leaves = {name: z[name].clone().requires_grad_() for name in names}
    pairs = _pairs(leaves, z.get("mask"))
    loss_B, right_B = pair_losses(kind, pairs)
    loss = loss_B.sum() / pairs.valid_B.sum()
    loss.backward()
    report.close("loss", loss, z["loss"], TIGHT)
    for name, grad in (("z_img", "img"), ("z_txt", "txt"), ("log_scale", "log_scale"), ("bias", "bias")):
        if name in leaves:
            report.close(f"grad_{grad}", _gradient(leaves[name]), z[f"grad_{grad}"], TIGHT)
    if "acc_i2t" in z:
        report.close("acc_i2t", right_B.sum() / pairs.valid_B.sum(), z["acc_i2t"], TIGHT)
    if "shard_losses" in z:
        count = len(z["z_img"]) // meta["shards"]
        shares = [
            pair_losses(kind, _shard(pairs, start, count))[0].sum() for start in range(0, len(loss_B), count)
        ]
        report.close("shard_losses", torch.stack(shares) / count, z["shard_losses"], TIGHT)


def lit(z: Arrays, meta: Meta, report: Report) -> None:
    """Steps of plain SGD on the text tower, against features that never change."""
    names = ["emb", "out_w", "out_b", "log_scale"] + (["bias"] if "bias" in z else [])
    names += ["head"] if meta["train_head"] else []
    params = nn.ParameterDict({name: nn.Parameter(z[name].clone()) for name in names})
    optimizer = torch.optim.SGD(params.parameters(), lr=float(z["lr"]))
    losses = []
    for rows in z["batches"].long():
        tokens, mask = z["tokens"].long()[rows], (z["tokens"][rows] != 0).double().unsqueeze(-1)
        pooled = (params["emb"][tokens] * mask).sum(1) / mask.sum(1)
        image = z["image_features"][rows]
        head = params["head"] if "head" in params else z.get("head")
        found: dict[str, Tensor] = {
            "z_img": image if head is None else image @ head,
            "z_txt": pooled.tanh() @ params["out_w"] + params["out_b"],
            **{name: params[name] for name in ("log_scale", "bias") if name in params},
        }
        optimizer.zero_grad()
        loss = pair_losses(meta["loss"], _pairs(found, None))[0].mean()
        loss.backward()
        update(params, optimizer, None)
        losses.append(loss.detach())
    report.close("after_losses", torch.stack(losses), z["after_losses"], TIGHT)
    for name in names:
        report.close(f"after_{name}", params[name], z[f"after_{name}"], TIGHT)


def zero_shot(z: Arrays, meta: Meta, report: Report) -> None:
    weights = class_weights(z["text_embeddings"], z["class_of_text"].long(), int(z["num_classes"]))
    cosine = unit(z["z_img"]) @ weights.T
    report.close("weights", weights, z["weights"], TIGHT)
    report.close("cosine", cosine, z["cosine"], TIGHT)
    report.exact("prediction", torch.equal(cosine.argmax(1), z["prediction"].long()))


def retrieval(z: Arrays, meta: Meta, report: Report) -> None:
    """By the rule that every equal wrong answer is ahead. Texts are unit vectors: the product is `sim`."""
    text_image, sim = z["text_image"].long(), z["sim"]
    for name, of in (("i2t", image_ranks), ("t2i", text_ranks)):
        found = of(sim, torch.eye(len(text_image)).double(), text_image)
        for measure, value in recalls(found.ranks_Q, tuple(z["ks"].long().tolist())).items():
            expected = z[f"worst__{name}_{measure}"]
            report.close(f"{name}_{measure}", torch.tensor(value, dtype=torch.float64), expected, TIGHT)


def _pairs(found: Arrays, mask: Tensor | None) -> Pairs:
    rows = len(found["z_img"])
    bias = found.get("bias", found["log_scale"].new_zeros(()))
    scale = torch.stack([found["log_scale"], bias]).expand(rows, 2)
    valid = torch.ones(rows, dtype=scale.dtype) if mask is None else mask.to(scale.dtype)
    return Pairs.of(found["z_img"], found["z_txt"], scale, valid, torch.arange(rows))


def _shard(pairs: Pairs, start: int, count: int) -> Pairs:
    own = {
        name: getattr(pairs, name)[start : start + count]
        for name in ("image_bD", "text_bD", "valid_b", "key_b")
    }
    return pairs._replace(first=start, **own)


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


FAMILIES = {
    "softmax": contrastive,
    "sigmoid": contrastive,
    "lit": lit,
    "zeroshot": zero_shot,
    "retrieval": retrieval,
}
