"""How many slots an expert gets.

Source: V-MoE section 2.4, B_e = round(k*N*P*C/E); Routers in Vision MoE section 3.1, round(c*T/E). `round` is
half to even, as in the authors' code; their later code takes `ceil` and multiples of 4, which is told here
by the config.
"""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """Attributes:
    capacity_factor: slots over assignments (tokens, times choices); below 1 some must go without.
    capacity_rounding, capacity_multiple_of: how the number of slots per expert becomes an integer.
    """

    capacity_factor: float = 1.0
    capacity_rounding: Literal["round", "ceil"] = "round"
    capacity_multiple_of: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.capacity_factor < math.inf:
            raise ValueError(f"capacity_factor must be positive and finite, got {self.capacity_factor}")
        if self.capacity_multiple_of < 1:
            raise ValueError(f"capacity_multiple_of must be at least 1, got {self.capacity_multiple_of}")

    def capacity(self, assignments: int, num_experts: int) -> int:
        """Slots per expert and group for `assignments` in the group.

        Raises:
            ValueError: if that is no slot at all.
        """
        to_integer = round if self.capacity_rounding == "round" else math.ceil
        slots = to_integer(assignments * self.capacity_factor / num_experts)
        if slots < 1:
            least = 0.5 * num_experts / assignments
            raise ValueError(
                f"capacity_factor={self.capacity_factor} leaves no slot: {assignments} assignments x"
                f" {self.capacity_factor} / {num_experts} experts rounds to 0; use more than {least:.3g},"
                " fewer experts or more images_per_group"
            )
        return math.ceil(slots / self.capacity_multiple_of) * self.capacity_multiple_of
