"""Experts that are spread over the ranks of a mesh axis: rows travel to their experts and back.

Slots are static, so every rank sends equal blocks and the host never waits for counts. Rows of any number
(`moe.rows`) are sent after their counts.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moe.experts import Experts
from moe.rows import sizes_of

Sizes = tuple[list[int], list[int]]  # rows that are sent to each rank, and received from each


class ExpertParallel(Experts):
    """`Experts` with the same contract and parameter names, with E spread over the ranks of a mesh axis.

    An expert's slots are independent, so they may be sent in up to `chunks` pieces: while the experts compute
    one piece, the next is being sent to them and the previous one back, in the backward pass too. The result
    is the same.
    """

    # A compiled all-to-all is waited for where it starts.
    uncompiled: ClassVar = (*Experts.uncompiled, "forward")

    def __init__(self, experts: Experts, mesh: DeviceMesh, *, chunks: int = 1) -> None:
        nn.Module.__init__(self)
        self.activation, self.dropout = experts.activation, experts.dropout
        self.equal_init = experts.equal_init
        self.group, self.chunks = mesh.get_group(), chunks
        for name, whole in experts.named_parameters():
            share = torch.empty(
                len(whole) // mesh.size(), *whole.shape[1:], device=whole.device, dtype=whole.dtype
            )
            spread = DTensor.from_local(
                share, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            self.register_parameter(name, nn.Parameter(spread))

    def forward(self, x_END: Tensor, keys_EN: Tensor | None = None, count_E: Tensor | None = None) -> Tensor:
        weights = (self.w_in_EDF, self.b_in_EF, self.w_out_EFD, self.b_out_ED)
        weights_here = [w.to_local() if isinstance(w, DTensor) else w for w in weights]
        if count_E is not None:
            return self._rows(x_END, keys_EN, count_E, weights_here)
        # Keys are sent first: they are small, and the first piece needs them.
        keys_sent = [] if keys_EN is None else self._send_pieces(keys_EN)
        y_sent = []
        for i, x_sent in enumerate(self._send_pieces(x_END)):
            keys_here = self._at_experts(keys_sent[i]) if keys_sent else None
            y_here = self.mlps(self._at_experts(x_sent), keys_here, *weights_here)
            y_sent.append(self._send(y_here.unflatten(1, (self.group.size(), -1)).transpose(0, 1)))
        return torch.cat([self._receive(y).flatten(0, 1) for y in y_sent], 1)

    def _rows(
        self, x_MD: Tensor, keys_M: Tensor | None, count_E: Tensor, weights_here: list[Tensor]
    ) -> Tensor:
        """Computes `rows` at the ranks of their experts. Every rank receives as many as choose its experts,
        in one piece."""
        count_RE = count_E.view(self.group.size(), -1)
        here_RE = wait_tensor(all_to_all_single(count_RE, None, None, self.group))  # of each rank
        sent, received = (sizes_of(count.sum(1), len(x_MD)) for count in (count_RE, here_RE))
        there_and_back = (sent, received), (received, sent)
        # They arrive by rank, and are sorted by expert.
        expert_R = torch.arange(here_RE.shape[1], device=here_RE.device).repeat(len(here_RE))
        expert_M = expert_R.repeat_interleave(here_RE.flatten(), output_size=sum(received))
        order_M = expert_M.argsort(stable=True)

        def at_experts(rows: Tensor) -> Tensor:
            return _Exchange.apply(rows[: sum(sent)], *there_and_back, self.group).index_select(0, order_M)

        keys_here = None if keys_M is None else at_experts(keys_M)
        y_here = self.row_mlps(at_experts(x_MD), here_RE.sum(0), keys_here, *weights_here)
        by_rank = torch.empty_like(y_here).index_copy(0, order_M, y_here)
        y_MD = _Exchange.apply(by_rank, *there_and_back[::-1], self.group)
        return F.pad(y_MD, (0, 0, 0, len(x_MD) - len(y_MD)))

    def _at_experts(self, rows: Tensor) -> Tensor:
        """Receives every rank's rows for this rank's experts: (E, n, ...) in flight -> (E/R, R*n, ...)."""
        return self._receive(rows).unflatten(0, (self.group.size(), -1)).transpose(0, 1).flatten(1, 2)

    def _send_pieces(self, rows: Tensor) -> list[Tensor]:
        return [self._send(piece) for piece in rows.chunk(self.chunks, 1)]

    def _send(self, blocks: Tensor) -> Tensor:
        return _Send.apply(blocks.contiguous(), self.group)

    def _receive(self, in_flight: Tensor) -> Tensor:
        return _Receive.apply(in_flight, self.group)


class _Send(Function):
    """Starts an all-to-all that exchanges the blocks of dim 0; only `_Receive` may read the result.

    It is a node of the graph because the gradient travels back the same way, sent by `_Receive` and awaited
    by `_Send`. The backward of torch's all-to-all would wait at once.
    """

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: Any) -> Tensor:
        return all_to_all_single(blocks, None, None, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return wait_tensor(gradients[0]), None


class _Receive(Function):
    """Waits for the all-to-all that `_Send` started."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return wait_tensor(blocks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return all_to_all_single(gradients[0].contiguous(), None, None, ctx.group), None


class _Exchange(Function):
    """Sends rows to each rank and receives rows from each; `back` are the sizes of their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, there: Sizes, back: Sizes, group: Any) -> Tensor:
        ctx.back, ctx.there, ctx.group = back, there, group
        sent, received = there
        return wait_tensor(all_to_all_single(rows.contiguous(), received, sent, group))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.forward(ctx, gradients[0], ctx.back, ctx.there, ctx.group), None, None, None
