"""The comparison of a golden case, with its tolerances, and its arrays as our weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe.experts import Experts

FORWARD, GRADIENT = 3e-5, 1e-4  # of the largest entry


@dataclass(frozen=True, kw_only=True)
class Report:
    """The arrays compared in a case, with their errors."""

    nan_fields: tuple[str, ...] = ()
    lines: list[tuple[str, str, bool]] = field(default_factory=list)

    def close(self, name: str, got: Tensor, expected: Tensor, tolerance: float = FORWARD) -> None:
        if got.shape != expected.shape:
            self.lines.append((name, f"shape {tuple(got.shape)}, not {tuple(expected.shape)}", True))
            return
        if name in self.nan_fields:  # the reference is NaN, ours must be finite
            self.lines.append((name, "finite", not got.isfinite().all()))
            return
        largest = expected.abs().max().item() if expected.numel() else 0.0
        error = (got.detach().double() - expected.double()).abs().max().item() if expected.numel() else 0.0
        relative = error / largest if largest else error
        self.lines.append((name, f"{relative:.1e}", not relative <= tolerance))

    def gradient(self, name: str, got: Tensor | None, expected: Tensor) -> None:
        self.close(
            name, torch.zeros_like(expected) if got is None else got.view_as(expected), expected, GRADIENT
        )

    def exact(self, name: str, same: bool) -> None:
        self.lines.append((name, "exact" if same else "differs", not same))

    def bound(self, name: str, value: float, most: float) -> None:
        self.lines.append((name, f"{value:.1e}", not value <= most))

    def failed(self) -> bool:
        return not self.lines or any(bad for *_, bad in self.lines)

    def __str__(self) -> str:
        return "  ".join(f"{name} {text}{' <-- FAIL' * bad}" for name, text, bad in self.lines)


Arrays = dict[str, Tensor]
Meta = dict[str, Any]
EXPERTS = {"w_in_EDF": "W1", "b_in_EF": "b1", "w_out_EFD": "W2", "b_out_ED": "b2"}  # our name -> the file's


def set_weights(module: nn.Module, names: Mapping[str, str], z: Arrays) -> None:
    """`names`: our name of every parameter -> the file's."""
    assert {name for name, _ in module.named_parameters()} == names.keys()
    with torch.no_grad():
        for ours, theirs in names.items():
            module.get_parameter(ours).copy_(z[theirs])


def experts_of(z: Arrays) -> Experts:
    experts = Experts(*z["W1"].shape).to(z["W1"].dtype)
    set_weights(experts, EXPERTS, z)
    return experts


def block_state(z: Arrays, router: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The state of a block: with experts if there is a router, whose state is given."""
    state = {f"norm{i}.{name}": z[f"ln{i}_{name[0]}"] for i in (1, 2) for name in ("weight", "bias")}
    state |= {f"attention.norm_{name}.weight": z[f"ln_{name}"] for name in "qk" if f"ln_{name}" in z}
    state |= {f"scale{i}_D": z[f"gamma{i}"] for i in (1, 2) if f"gamma{i}" in z}
    state |= {
        "attention.qkv.weight": torch.cat([z[f"W{part}"].T for part in "qkv"]),
        "attention.qkv.bias": torch.cat([z[f"b{part}"] for part in "qkv"]),
        "attention.out.weight": z["Wo"].T,
        "attention.out.bias": z["bo"],
    }
    if router is None:
        for ours, number in (("up", "1"), ("down", "2")):
            state |= {f"mlp.{ours}.weight": z[f"W{number}"].T, f"mlp.{ours}.bias": z[f"b{number}"]}
        return state
    state |= {f"mlp.experts.{ours}": z[theirs] for ours, theirs in EXPERTS.items()}
    return state | {f"mlp.router.{name}": tensor for name, tensor in router.items()}
