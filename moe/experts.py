"""E independent MLPs as two batched matmuls.

Source: V-MoE (Riquelme et al. 2021, section 2.1): Dense -> GELU (tanh approximation, as in the authors'
code) -> Dense, biases on both; in fine-tuning, dropout after both (section 3.5). Weights are stored
input-major, (E, in, out), which batched matmul reads fastest.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.init import Draw, xavier_uniform, zeros
from moe.noise import dropout, mix

Activation = Literal["gelu", "relu"]


class Experts(nn.Module):
    """(E, N, D) -> (E, N, D), or sorted rows, any number per expert. Knows no routing and no other ranks."""

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden: int,
        *,
        activation: Activation = "gelu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.dropout = dropout
        self.w_in_EDF = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.b_in_EF = nn.Parameter(torch.empty(num_experts, hidden))
        self.w_out_EFD = nn.Parameter(torch.empty(num_experts, hidden, dim))
        self.b_out_ED = nn.Parameter(torch.empty(num_experts, dim))

    def draws(self) -> dict[str, Draw]:
        _, dim, hidden = self.w_in_EDF.shape
        weight = xavier_uniform(dim, hidden)
        return {
            "w_in_EDF": weight.per_row(),
            "b_in_EF": zeros(),
            "w_out_EFD": weight.per_row(),
            "b_out_ED": zeros(),
        }

    def forward(self, x_END: Tensor, keys_EN: Tensor | None = None) -> Tensor:
        """`keys_EN` (int64, one per row) seed dropout; without them there is none."""
        return self.mlps(x_END, keys_EN, self.w_in_EDF, self.b_in_EF, self.w_out_EFD, self.b_out_ED)

    def rows(self, x_MD: Tensor, count_E: Tensor) -> Tensor:
        """(M, D) -> (M, D), rows sorted by expert, count_E of each. Only experts that have rows are read.

        No dropout: for evaluation.
        """
        if grouped_matmul_fits(self.w_in_EDF):
            return self.rows_in_groups(x_MD, count_E)
        pieces = [
            self._expert(e, x_ND) for e, x_ND in enumerate(x_MD.split(count_E.tolist())) if len(x_ND) > 0
        ]
        return torch.cat(pieces)

    def _expert(self, e: int, x_ND: Tensor) -> Tensor:
        h_NF = activate(torch.addmm(self.b_in_EF[e], x_ND, self.w_in_EDF[e]), self.activation)
        return torch.addmm(self.b_out_ED[e], h_NF, self.w_out_EFD[e])

    def rows_in_groups(self, x_MD: Tensor, count_E: Tensor) -> Tensor:
        """`rows` in two kernels, without telling the host how many rows there are."""
        expert_M = torch.repeat_interleave(count_E, output_size=len(x_MD))
        end_E = count_E.cumsum(0, dtype=torch.int32)
        h_MF = F.grouped_mm(x_MD, self.w_in_EDF, offs=end_E) + self.b_in_EF[expert_M]
        h_MF = activate(h_MF, self.activation)
        return F.grouped_mm(h_MF, self.w_out_EFD, offs=end_E) + self.b_out_ED[expert_M]

    def mlps(
        self,
        x_END: Tensor,
        keys_EN: Tensor | None,
        w_in_EDF: Tensor,
        b_in_EF: Tensor,
        w_out_EFD: Tensor,
        b_out_ED: Tensor,
    ) -> Tensor:
        """Row n of expert e through that expert's MLP, with weights that may be a rank's share."""
        h_ENF = activate(torch.baddbmm(b_in_EF.unsqueeze(1), x_END, w_in_EDF), self.activation)
        if keys_EN is not None:
            h_ENF = dropout(h_ENF, self.dropout, mix(keys_EN, 0))
        y_END = torch.baddbmm(b_out_ED.unsqueeze(1), h_ENF, w_out_EFD)
        return y_END if keys_EN is None else dropout(y_END, self.dropout, mix(keys_EN, 1))


def grouped_matmul_fits(w_EDF: Tensor) -> bool:
    """Whether torch's grouped matmul is one kernel here: bfloat16 rows of 16 bytes on CUDA from SM 8.0."""
    return (
        w_EDF.is_cuda
        and w_EDF.dtype is torch.bfloat16
        and torch.cuda.get_device_capability(w_EDF.device) >= (8, 0)
        and all(size % 8 == 0 for size in w_EDF.shape[1:])
    )


def activate(h: Tensor, activation: Activation) -> Tensor:
    return F.relu(h) if activation == "relu" else F.gelu(h, approximate="tanh")
