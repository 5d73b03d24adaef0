"""The comparison of a golden case, with its tolerances."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
