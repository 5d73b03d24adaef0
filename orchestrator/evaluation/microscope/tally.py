"""Sums over images of what a layer does, and the figures that follow from them.

Source: V-MoE (Riquelme et al. 2021), section 5 and appendix E: experts by class (figure 7), by position
(figure 30), weights of the chosen experts; multiplicity as in Soft MoE, appendix B.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from orchestrator.evaluation.microscope.views import View

BINS = 50  # of the histogram of weights, which lie in 0..1


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Attributes:
    class_expert: (classes, E), gates summed over the patches of the class.
    position_expert: (P, E), gates summed over images.
    experts: (E + 1,), patches that 0, 1, .. E experts see.
    weights: (BINS,), seats by the weight of the expert's output.
    weight_sum: scalar, of those.
    """

    class_expert: Tensor
    position_expert: Tensor
    experts: Tensor
    weights: Tensor
    weight_sum: Tensor

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    def cpu(self) -> "Tally":
        return Tally(**{f.name: getattr(self, f.name).cpu() for f in fields(self)})

    def mean_by_class(self) -> Tensor:
        """(classes, E): mean routing weight of the class's patches; 0 for a class without images."""
        return _per_row(self.class_expert)

    def mean_by_position(self) -> Tensor:
        """(P, E): mean routing weight at that place."""
        return _per_row(self.position_expert)

    def experts_frac(self) -> Tensor:
        """(E + 1,): share of the patches that 0, 1, .. E experts see; the first are discarded."""
        return self.experts / self.experts.sum()

    def mean_weight(self) -> float:
        """Of a seat."""
        return float(self.weight_sum / self.weights.sum().clamp(min=1))


def tally(view: View, label_B: Tensor, *, classes: int) -> Tally:
    """Of one batch; those of several add up. float64 counts are exact."""
    gate_BPE = view.gate_BPE.double()
    E = gate_BPE.shape[-1]
    weight = view.weight_BPE[view.seat_BPE].double()
    bin_of = (weight * BINS).long().clamp(0, BINS - 1)
    return Tally(
        class_expert=gate_BPE.new_zeros(classes, E).index_add(0, label_B, gate_BPE.sum(1)),
        position_expert=gate_BPE.sum(0),
        experts=torch.bincount(view.experts_BP().flatten(), minlength=E + 1).double(),
        weights=torch.bincount(bin_of, minlength=BINS).double(),
        weight_sum=weight.sum(),
    )


def mutual_information(mass: Tensor) -> float:
    """Nats between the row and the column of a table of non-negative mass: 0 if experts do not care for the
    class, ln(classes) if each class has experts of its own."""
    joint = mass.double() / mass.sum()
    apart = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    ratio = torch.where(joint > 0, joint / apart.clamp(min=1e-300), 1.0)
    return float((joint * ratio.log()).sum())


def block_order(mean: Tensor) -> tuple[list[int], list[int]]:
    """Rows and columns so that structure shows as a diagonal of blocks: every row stands beside the column
    that it favours most, compared with the other rows; columns by how strongly they are favoured."""
    lift = mean / mean.mean(0).clamp(min=1e-30)
    favourite, strength = lift.argmax(1), lift.amax(1)
    columns = lift.amax(0).argsort(descending=True, stable=True).tolist()
    columns = [c for c in columns if (favourite == c).any()] + [
        c for c in columns if not (favourite == c).any()
    ]
    place = {column: i for i, column in enumerate(columns)}
    rows = sorted(range(len(mean)), key=lambda r: (place[int(favourite[r])], -float(strength[r])))
    return rows, columns


def _per_row(mass: Tensor) -> Tensor:
    return mass / mass.sum(1, keepdim=True).clamp(min=1e-30)
