"""How many slots an expert gets.

Source: V-MoE section 2.4, B_e = round(k*N*P*C/E); Routers in Vision MoE section 3.1, round(c*T/E). `round`
is half to even, as in the authors' code. Their later code rounds up to multiples of 4 instead; we follow
the papers.
"""


def slots_per_expert(assignments: int, num_experts: int, factor: float) -> int:
    """Slots per expert and group for `assignments` tokens (times choices) in the group.

    Raises:
        ValueError: if that rounds to no slot at all.
    """
    slots = round(assignments * factor / num_experts)
    if slots < 1:
        least = 0.5 * num_experts / assignments
        raise ValueError(
            f"capacity_factor={factor} leaves no slot: {assignments} assignments x {factor} / {num_experts}"
            f" experts rounds to 0; use more than {least:.3g}, fewer experts or more images_per_group"
        )
    return slots


def check_factor(factor: float) -> None:
    if factor <= 0:
        raise ValueError(f"capacity_factor must be positive, got {factor}")
