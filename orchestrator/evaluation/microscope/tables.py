"""The figures behind the pictures, as tables: name -> columns."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from orchestrator.evaluation.microscope.examples import Examples
from orchestrator.evaluation.microscope.slots import Spread, spread
from orchestrator.evaluation.microscope.survey import Layer, Survey
from orchestrator.evaluation.microscope.tally import BINS

Table = dict[str, list[Any]]


def tables(survey: Survey, examples: Examples, names: tuple[str, ...]) -> dict[str, Table]:
    """Those that the router has something for."""
    found = {
        "layers": layer_table(survey),
        "classes": _matrices(survey, "class", lambda layer: layer.tally.mean_by_class(), names),
        "positions": _matrices(survey, "position", lambda layer: layer.tally.mean_by_position()),
        "experts_per_patch": _histograms(
            survey, "experts", lambda layer: layer.tally.experts_frac(), list(range(1 + _experts(survey)))
        ),
        "weights": _histograms(
            survey,
            "weight_from",
            lambda layer: layer.tally.weights / layer.tally.weights.sum().clamp(min=1),
            [i / BINS for i in range(BINS)],
        ),
        "flips": _rows(
            ("block", "sigma", "flip_frac"),
            [
                (layer.block, sigma, share)
                for layer in survey.layers
                for sigma, share in zip(survey.sigmas, layer.flips or (), strict=False)
            ],
        ),
        "discarded": _rows(
            ("block", "capacity", "priority", "discarded_frac"),
            [
                (block, one.capacity, one.priority, frac)
                for one, fractions in zip(examples.discarded, examples.discarded_frac, strict=True)
                for block, frac in fractions.items()
            ],
        ),
        "slot_similarity": _rows(
            ("block", "of", "least", "mean", "most"),
            [
                (layer.block, what, one.least, one.mean, one.most)
                for layer in survey.layers
                for what, one in similarities(layer).items()
            ],
        ),
    }
    return {name: table for name, table in found.items() if table["block"]}


def layer_table(survey: Survey) -> Table:
    """A row per MoE layer: every figure that is one number."""
    table: Table = {
        "block": [layer.block for layer in survey.layers],
        "mutual_information_nats": [layer.mutual_information() for layer in survey.layers],
        "contribution_ratio": [layer.contribution for layer in survey.layers],
        "discarded_frac": [float(layer.tally.experts_frac()[0]) for layer in survey.layers],
        "weight_mean": [layer.tally.mean_weight() for layer in survey.layers],
        "acc_random": [layer.acc_random for layer in survey.layers],
        "acc_lost": [survey.acc - layer.acc_random for layer in survey.layers],
    }
    if survey.layers[0].flips is not None:
        at = survey.sigmas.index(1.0)
        table["flip_frac_sigma_1"] = [(layer.flips or ())[at] for layer in survey.layers]
    if survey.layers[0].slots is not None:
        table["slot_cosine_mean"] = [similarities(layer)["dispatch"].mean for layer in survey.layers]
    return table


def similarities(layer: Layer) -> dict[str, Spread]:
    """Of slots' dispatch weights, tokens' combine rows and slots' parameters; {} without slots."""
    found = layer.slots.spreads() if layer.slots is not None else {}
    return found | ({"parameters": spread(layer.parameters)} if layer.parameters is not None else {})


def _experts(survey: Survey) -> int:
    return survey.layers[0].tally.class_expert.shape[1]


def _matrices(
    survey: Survey, row_name: str, of: Callable[[Layer], Tensor], names: Sequence[str] = ()
) -> Table:
    """One row per block, row and expert."""
    return _rows(
        ("block", row_name, "expert", "mean_weight"),
        [
            (layer.block, names[i] if names else i, expert, weight)
            for layer in survey.layers
            for i, row in enumerate(of(layer).tolist())
            for expert, weight in enumerate(row)
        ],
    )


def _histograms(survey: Survey, what: str, of: Callable[[Layer], Tensor], values: Sequence[float]) -> Table:
    return _rows(
        ("block", what, "frac"),
        [
            (layer.block, value, frac)
            for layer in survey.layers
            for value, frac in zip(values, of(layer).tolist(), strict=True)
        ],
    )


def _rows(columns: tuple[str, ...], rows: Sequence[tuple[Any, ...]]) -> Table:
    return {name: [row[i] for row in rows] for i, name in enumerate(columns)}
