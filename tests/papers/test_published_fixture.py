"""The table of published settings is well formed. `test_published_arms` has its parameters and costs."""

import csv
from pathlib import Path

FIXTURES = Path(__file__).parents[1] / "fixtures"
ROWS = list(csv.DictReader((FIXTURES / "published_arms.csv").open()))
FAMILIES = {
    "dense",
    "soft",
    "token_choice",
    "expert_choice",
    "sinkhorn_token_choice",
    "sinkhorn_expert_choice",
    "sparse_transport_expert_choice",
}
SWEEPS = {
    "pareto": 107,
    "ablations": 6,
    "slots_experts": 136,
    "long_runs": 20,
    "routers": 36,
    "softmax_combine": 4,
    "expert_count": 5,
    "capacity": 16,
    "vmoe": 19,
    "finetune": 5,
}
WORDS = {
    "layers": {"every_2", "last_6", "last_12", "last_16", "last_2_odd", "last_5_odd"},
    "priority": {"none", "max", "sum"},
    "dispatch": {"soft", "uniform", "identity"},
    "combine": {"soft", "uniform", "identity", "softmax", "affinity"},
    "gflops_convention": {"2mac"},
    "train_exaflops_convention": {"3mac", "6mac"},
    "tpu_days_unit": {"chip", "core"},
    "schedule": {"rsqrt", "linear", "cosine", "constant"},
    "decays": {"all", "kernels"},
    "optimizer": {"adam", "adafactor", "sgd", "AdamW", "FusedLAMB"},
    "loss": {"sigmoid", "softmax"},
    "augment": {"inception_crop+flip"},
    "dtype_first_moment": {"float32"},
}
NUMBERS_OR = {"clip_norm": "none", "mixup": "none", "head_bias": "-log(num_classes)"}
TEXT = {"sweep", "paper", "arm", "family", "source", "randaugment"}
MOE_SOURCES = ("appendix", "section", "table", "figure", "caption", "equation", "configs/")


def test_every_sweep_has_its_rows() -> None:
    assert {name: sum(row["sweep"] == name for row in ROWS) for name in SWEEPS} == SWEEPS
    assert len(ROWS) == sum(SWEEPS.values())
    assert len({(row["sweep"], row["arm"]) for row in ROWS}) == len(ROWS)


def test_rows_are_well_formed() -> None:
    for row in ROWS:
        assert row["arm"], row
        assert row["family"] in FAMILIES, row
        assert any(word in row["source"] for word in MOE_SOURCES), row
        for name, value in row.items():
            if name in WORDS and value:
                assert value in WORDS[name], (name, row)
            elif name not in TEXT and value not in ("", NUMBERS_OR.get(name)):
                assert float(value) >= -10, (name, row)


def test_every_filled_cell_has_a_source() -> None:
    """A source names its columns: ``patch, experts: table 2; ..``."""
    for row in ROWS:
        heads = [item.partition(": ")[0] for item in row["source"].split("; ")]
        named = {name for head in heads for name in head.split(", ")}
        filled = {name for name, value in row.items() if value}
        assert filled - named <= {"sweep", "paper", "arm", "family", "source"}, row
