"""For every field of the papers' configs: another value, and what then differs."""

from tests.orchestrator.option_cases import BOTH, TINY, Case, Place, below

ASTROFORMER = TINY | below(
    "model",
    {
        "kind": "astroformer",
        "image_size": 16,
        "num_classes": 10,
        "stages": "CT",
        "widths": (8, 16),
        "depths": (1, 2),
        "stem_width": 4,
        "head_dim": 8,
    },
)
MODELS = {
    "AstroformerConfig": Place("model", BOTH, ASTROFORMER, {
        "image_size": 8,
        "num_classes": 12,
        "stages": "TT",
        "widths": (8, 24),
        "depths": (2, 2),
        "stem_width": 8,
        "head_dim": Case(16, "steps"),
        "dropout": Case(0.5, "steps"),
        "moe": {"layers": (1,), "num_experts": 4},
    }),
}  # fmt: skip
