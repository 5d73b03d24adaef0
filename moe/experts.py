"""E independent MLPs as two batched matmuls, and the way to run only some of them.

Source: V-MoE (Riquelme et al. 2021, section 2.1): Dense -> GELU (tanh approximation, as in the authors'
code) -> Dense, biases on both; in fine-tuning, dropout after both (section 3.5). Weights are stored
input-major, (E, in, out), which batched matmul reads fastest. Expert subsets: Chung et al. 2024, "Beyond
Parameter Count: Implicit Bias in Soft Mixture of Experts", algorithm 1 and section 4.5, for one image; here
each group has a subset of its own.
"""

from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.dense import Activation, activate
from moe.init import Draw, dropout, mix, xavier_uniform, zeros
from moe.overrides import RoutingOverrides
from moe.routing import Routing
from moe.rows import has_values, sizes_of


def is_expert(name: str) -> bool:
    """Returns whether a parameter of this name is a stack with a layer of each expert."""
    return ".experts." in name


class Experts(nn.Module):
    """MLPs on N rows per expert, (E, N, D) -> (E, N, D), or on rows of any number per expert (`rows`)."""

    undecayed: ClassVar = ("b_in_EF", "b_out_ED")  # biases, which are stacked
    # Its sizes are data, with which a compiler would begin anew each time.
    uncompiled: ClassVar = ("row_mlps",)

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden: int,
        *,
        activation: Activation = "gelu",
        dropout: float = 0.0,
        equal_init: bool = False,
    ) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.dropout = dropout
        self.equal_init = equal_init
        self.w_in_EDF = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.b_in_EF = nn.Parameter(torch.empty(num_experts, hidden))
        self.w_out_EFD = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.b_out_ED = nn.Parameter(torch.empty(num_experts, dim))

    def draws(self) -> dict[str, Draw]:
        _, dim, hidden = self.w_in_EDF.shape
        weight = xavier_uniform(dim, hidden).per_row(equal=self.equal_init)
        return {
            "w_in_EDF": weight,
            "b_in_EF": zeros(),
            "w_out_EFD": weight,
            "b_out_ED": zeros(),
        }

    def forward(self, x_END: Tensor, keys_EN: Tensor | None = None, count_E: Tensor | None = None) -> Tensor:
        """Applies the experts; `keys_EN` (int64, one per row) seed dropout, which needs them. With `count_E`
        the rows are those of `rows`."""
        if count_E is not None:
            return self.rows(x_END, count_E, keys_EN)
        return self.mlps(x_END, keys_EN, self.w_in_EDF, self.b_in_EF, self.w_out_EFD, self.b_out_ED)

    def rows(self, x_MD: Tensor, count_E: Tensor, keys_M: Tensor | None = None) -> Tensor:
        """Applies the experts to rows sorted by expert, count_E rows each: (M, D) -> (M, D).

        Rows after those of the experts are zeros, and become finite. The host waits for the counts, but where
        CUDA has a grouped matmul.
        """
        weights = (self.w_in_EDF, self.b_in_EF, self.w_out_EFD, self.b_out_ED)
        return self.row_mlps(x_MD, count_E, keys_M, *weights)

    def row_mlps(
        self, x_MD: Tensor, count_E: Tensor, keys_M: Tensor | None, w_in_EDF: Tensor, *others: Tensor
    ) -> Tensor:
        """Computes `rows` with the weights of all experts, or those of a rank's experts alone."""
        M, E = len(x_MD), len(count_E)
        if x_MD.is_cuda and grouped_matmul_fits(w_in_EDF):
            # The last expert computes what is left, so that no number of rows is data.
            count_E = torch.cat([count_E[:-1], (M - count_E[:-1].sum()).unsqueeze(0)])
            return self._rows_in_groups(x_MD, count_E, keys_M, w_in_EDF, *others)
        sizes = sizes_of(count_E, M)
        computed = sum(sizes)
        x_MD, keys_M = x_MD[:computed], None if keys_M is None else keys_M[:computed]
        if grouped_matmul_fits(w_in_EDF):
            y_MD = self._rows_in_groups(x_MD, count_E, keys_M, w_in_EDF, *others)
        else:
            keys = [None] * E if keys_M is None else keys_M.unsqueeze(0).split(sizes, 1)
            weights = (w.split(1) for w in (w_in_EDF, *others))
            # Not `self.mlps`, which is compiled for one shape.
            pieces = map(partial(Experts.mlps, self), x_MD.unsqueeze(0).split(sizes, 1), keys, *weights)
            y_MD = torch.cat([*pieces], 1).squeeze(0)
        return F.pad(y_MD, (0, 0, 0, M - computed)) if computed < M else y_MD

    def _rows_in_groups(
        self,
        x_MD: Tensor,
        count_E: Tensor,
        keys_M: Tensor | None,
        w_in_EDF: Tensor,
        b_in_EF: Tensor,
        w_out_EFD: Tensor,
        b_out_ED: Tensor,
    ) -> Tensor:
        """Computes `rows` in two kernels."""
        expert_M = torch.repeat_interleave(count_E, output_size=len(x_MD))
        end_E = count_E.cumsum(0, dtype=torch.int32)
        h_MF = F.grouped_mm(x_MD, w_in_EDF, offs=end_E) + b_in_EF.index_select(0, expert_M)
        h_MF = activate(h_MF, self.activation, inplace=True)
        if keys_M is not None:
            h_MF = dropout(h_MF, self.dropout, mix(keys_M, 0))
        y_MD = F.grouped_mm(h_MF, w_out_EFD, offs=end_E) + b_out_ED.index_select(0, expert_M)
        return y_MD if keys_M is None else dropout(y_MD, self.dropout, mix(keys_M, 1))

    def mlps(
        self,
        x_END: Tensor,
        keys_EN: Tensor | None,
        w_in_EDF: Tensor,
        b_in_EF: Tensor,
        w_out_EFD: Tensor,
        b_out_ED: Tensor,
    ) -> Tensor:
        """Applies expert e's MLP to its rows; the weights may be those of a rank's experts alone."""
        # The bias is added after the product, so that a compiler fuses it with the activation.
        h_ENF = add_bias(torch.bmm(x_END, w_in_EDF), b_in_EF)
        h_ENF = activate(h_ENF, self.activation, inplace=True)
        if keys_EN is not None:
            h_ENF = dropout(h_ENF, self.dropout, mix(keys_EN, 0))
        y_END = add_bias(torch.bmm(h_ENF, w_out_EFD), b_out_ED)
        return y_END if keys_EN is None else dropout(y_END, self.dropout, mix(keys_EN, 1))


def add_bias(y_END: Tensor, b_ED: Tensor) -> Tensor:
    """Adds each expert's bias to its rows, in place: new memory costs more than the sum. Under autocast the
    bias has more bits than the product, and the sum keeps them.
    """
    b_E1D = b_ED.unsqueeze(1)
    return y_END.add_(b_E1D) if y_END.dtype == b_E1D.dtype else y_END + b_E1D


def grouped_matmul_fits(w_EDF: Tensor) -> bool:
    """Returns whether torch has a grouped matmul for these weights: rows of 16 bytes; on the CPU float32 or
    bfloat16; on CUDA bfloat16 with SM >= 8.0.
    """
    if any(size * w_EDF.itemsize % 16 for size in w_EDF.shape[1:]):
        return False
    if w_EDF.is_cuda:
        return w_EDF.dtype is torch.bfloat16 and torch.cuda.get_device_capability(w_EDF.device) >= (8, 0)
    return w_EDF.is_cpu and has_values(w_EDF) and w_EDF.dtype in (torch.float32, torch.bfloat16)


def chosen_alone(experts: Experts, routing: Routing, overrides: RoutingOverrides) -> int | None:
    """Returns the number of experts of each group to run alone, or None to run all and mask the others.

    Training and compiled graphs need static shapes, and experts that are spread over ranks (a subclass made
    by `ExpertParallel` or FSDP) have their weights elsewhere. Without slots the others have no rows.
    """
    if routing.kept_GE is None or routing.count_E is not None or type(experts) is not Experts:
        return None
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    num_experts = routing.kept_GE.shape[1]
    k = overrides.num_kept(num_experts)
    return k if k < num_experts else None


def run_chosen(experts: Experts, routing: Routing, x_GSD: Tensor, k: int) -> Tensor:
    """Dispatches, runs only the k kept experts of each group and combines: (G, S, D) -> (G, S, D).

    Every group has experts of its own, so rows are sorted by expert. The result is that of all experts with
    the weights of the others set to zero.
    """
    assert routing.kept_GE is not None
    expert_GK = routing.kept_GE.byte().argsort(dim=1, descending=True, stable=True)[:, :k]
    chosen = routing.only(expert_GK)
    x_KND = chosen.dispatch(x_GSD)
    slots = x_KND.shape[1] // len(expert_GK)
    expert_M = expert_GK.T.repeat_interleave(slots, 1).flatten()
    order_M = expert_M.argsort(stable=True)
    x_MD = x_KND.flatten(0, 1).index_select(0, order_M)
    y_MD = experts.rows(x_MD, routing.kept_GE.sum(0) * slots)
    y_KND = torch.empty_like(y_MD).index_copy(0, order_M, y_MD).view(x_KND.shape)
    return chosen.combine(y_KND)
