"""What passes through the MoE blocks of a model while it runs."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from moe.vit import ViT


class Tap:
    """Of one MoE block, in the newest forward pass. Attributes:
    residual_BSD: the stream that the experts' outputs are added to.
    experts_BSD: those outputs, combined.
    router_GSD, valid_GS: what the router was given.
    """

    residual_BSD: Tensor
    experts_BSD: Tensor
    router_GSD: Tensor
    valid_GS: Tensor

    def attach(self, block: nn.Module) -> list[RemovableHandle]:
        def residual(_: nn.Module, given: tuple[Tensor], __: Tensor) -> None:
            (self.residual_BSD,) = given

        def experts(_: nn.Module, __: Any, result: tuple[Tensor, Any]) -> None:
            self.experts_BSD = result[0]

        def router(_: nn.Module, given: tuple[Tensor, ...], __: Any) -> None:
            self.router_GSD, self.valid_GS = given[:2]

        hooks = {"norm2": residual, "mlp": experts, "mlp.router": router}
        return [block.get_submodule(name).register_forward_hook(hook) for name, hook in hooks.items()]

    def contribution_BS(self) -> Tensor:
        """|moe(x)| / |x| of each token, x the residual stream: near 0, the block ignores its experts. 0 for
        discarded tokens."""
        return self.experts_BSD.norm(dim=-1) / self.residual_BSD.norm(dim=-1).clamp(min=1e-30)


@contextmanager
def tapped(model: ViT, blocks: Sequence[int]) -> Iterator[dict[int, Tap]]:
    """By block; they hold something after the first forward pass."""
    taps = {i: Tap() for i in blocks}
    with ExitStack() as stack:
        for i, tap in taps.items():
            for handle in tap.attach(model.blocks[i]):
                stack.callback(handle.remove)
        yield taps
