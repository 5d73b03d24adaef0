"""Experts spread over ranks: rows travel to their experts and the results back, while experts compute."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moe.experts import Experts


class ExpertParallel(Experts):
    """`Experts` under the same contract and parameter names, with E spread over the ranks of a mesh axis.

    Slots are static, so every rank sends equal blocks and the host never waits for counts. An expert's rows
    are independent, so they may travel in up to `chunks` pieces: while experts compute on one, the next is
    on its way to them and the one before on its way back; in the backward pass too. The result is the same.
    """

    def __init__(self, experts: Experts, mesh: DeviceMesh, *, chunks: int = 1) -> None:
        nn.Module.__init__(self)
        self.activation, self.dropout = experts.activation, experts.dropout
        self.group, self.chunks = mesh.get_group(), chunks
        for name, whole in experts.named_parameters():
            share = torch.empty(
                len(whole) // mesh.size(), *whole.shape[1:], device=whole.device, dtype=whole.dtype
            )
            spread = DTensor.from_local(
                share, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            self.register_parameter(name, nn.Parameter(spread))

    def forward(self, x_END: Tensor, keys_EN: Tensor | None = None) -> Tensor:
        weights = (self.w_in_EDF, self.b_in_EF, self.w_out_EFD, self.b_out_ED)
        weights_here = [w.to_local() if isinstance(w, DTensor) else w for w in weights]
        # keys go first: they are small, and the first piece needs them
        keys_sent = [] if keys_EN is None else self._send_pieces(keys_EN)
        y_sent = []
        for i, x_sent in enumerate(self._send_pieces(x_END)):
            keys_here = self._at_experts(keys_sent[i]) if keys_sent else None
            y_here = self.mlps(self._at_experts(x_sent), keys_here, *weights_here)
            y_sent.append(self._send(y_here.unflatten(1, (self.group.size(), -1)).transpose(0, 1)))
        return torch.cat([self._receive(y).flatten(0, 1) for y in y_sent], 1)

    def _at_experts(self, rows: Tensor) -> Tensor:
        """Every rank's rows for the experts that live here: (E, n, ...) on its way -> (E/R, R*n, ...)."""
        return self._receive(rows).unflatten(0, (self.group.size(), -1)).transpose(0, 1).flatten(1, 2)

    def _send_pieces(self, rows: Tensor) -> list[Tensor]:
        return [self._send(piece) for piece in rows.chunk(self.chunks, 1)]

    def _send(self, blocks: Tensor) -> Tensor:
        return _Send.apply(blocks.contiguous(), self.group)

    def _receive(self, on_its_way: Tensor) -> Tensor:
        return _Receive.apply(on_its_way, self.group)


class _Send(Function):
    """Starts an all-to-all that exchanges the blocks of dim 0; what it returns is for `_Receive` alone.

    A node of its own, because the gradient takes the way back: where it is received, sent and waited for is
    where `_Receive` and `_Send` stand, mirrored. The all-to-all's own backward would wait at once.
    """

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: Any) -> Tensor:
        return all_to_all_single(blocks, None, None, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return wait_tensor(gradients[0]), None


class _Receive(Function):
    """Waits for what `_Send` started."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return wait_tensor(blocks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_to_all_single(gradients[0].contiguous(), None, None, ctx.group), None
