"""How well subsets of a `PatchNet`'s experts do, for every subset there is.

The net's head is linear and it has no skip connection: its logits are the head's bias and one term per
expert, so the logits of a subset are a sum of terms that are computed once.

Source: Chung et al. 2024, "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts", sections 4.1
to 4.3.
"""

from dataclasses import dataclass
from itertools import combinations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.overrides import RoutingOverrides
from moe.patch_net import PatchNet

CHUNK = 256  # subsets at a time: 256 x 790 images x 10 classes are 8 MB


@dataclass(frozen=True, kw_only=True)
class Terms:
    """Attributes:
    bias: (classes,), the logits of no expert.
    experts_EBL: what each expert adds to the logits (L) of each image.
    """

    bias: Tensor
    experts_EBL: Tensor

    def logits(self, mask_MBE: Tensor) -> Tensor:
        """(M, B, classes) of M choices of experts for each image; (M, 1, E) is the same for all images."""
        if mask_MBE.shape[1] == 1:
            return self.bias + torch.einsum("me,ebl->mbl", mask_MBE[:, 0], self.experts_EBL)
        return self.bias + torch.einsum("mbe,ebl->mbl", mask_MBE, self.experts_EBL)


@dataclass(frozen=True, kw_only=True)
class Exhaustive:
    """Attributes:
    solved: share of the images that some subset of that size gets right.
    unique: different subsets among those of least loss, one for each image.
    cap: the most that there can be: images or subsets, whichever are fewer.
    """

    solved: float
    unique: int
    cap: int


@torch.no_grad()
def terms_of(net: PatchNet, images: Tensor) -> Terms:
    """Runs each expert alone."""
    alone = [net(images, RoutingOverrides(experts=(e,))) for e in range(net.config.num_experts)]
    return Terms(bias=net.head.bias.detach(), experts_EBL=torch.stack(alone) - net.head.bias)


def exhaustive(terms: Terms, labels_B: Tensor, k: int) -> Exhaustive:
    """Every subset of k experts on every image."""
    E, B, _ = terms.experts_EBL.shape
    subsets_MK = torch.tensor(list(combinations(range(E), k)))
    solved_B = torch.zeros(B, dtype=torch.bool)
    least_B, best_B = torch.full((B,), torch.inf), torch.zeros(B, dtype=torch.long)
    for start in range(0, len(subsets_MK), CHUNK):
        chunk_MK = subsets_MK[start : start + CHUNK]
        mask_ME = torch.zeros(len(chunk_MK), E).scatter(1, chunk_MK, 1.0)
        logits_MBL = terms.logits(mask_ME.unsqueeze(1))
        solved_B |= (logits_MBL.argmax(-1) == labels_B).any(0)
        label_MB1 = labels_B.expand(len(chunk_MK), -1).unsqueeze(-1)
        loss_MB = -F.log_softmax(logits_MBL, -1).gather(-1, label_MB1).squeeze(-1)
        loss_B, index_B = loss_MB.min(0)
        best_B = torch.where(loss_B < least_B, index_B + start, best_B)
        least_B = torch.minimum(least_B, loss_B)
    return Exhaustive(
        solved=solved_B.float().mean().item(),
        unique=len(best_B.unique()),
        cap=min(B, len(subsets_MK)),
    )


def random_accuracies(terms: Terms, labels_B: Tensor, k: int, *, seeds: int = 10) -> list[float]:
    """Of k experts drawn for each image, once per seed."""
    E, B, _ = terms.experts_EBL.shape
    found = []
    for seed in range(seeds):
        drawn_BE = torch.rand(B, E, generator=torch.Generator().manual_seed(seed))
        mask_BE = torch.zeros(B, E).scatter(1, drawn_BE.argsort(1)[:, :k], 1.0)
        found.append((terms.logits(mask_BE.unsqueeze(0))[0].argmax(-1) == labels_B).float().mean().item())
    return found


@torch.no_grad()
def chosen_accuracy(net: PatchNet, images: Tensor, labels_B: Tensor, k: int) -> float:
    """Of the k experts of largest weight for each image (algorithm 1)."""
    logits_BL = net(images, RoutingOverrides(experts=k))
    return (logits_BL.argmax(-1) == labels_B).float().mean().item()
