"""The studies by name."""

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.evaluation.studies import faster_inference, l2norm, operating, specialisation
from orchestrator.evaluation.studies.found import Found, Say


@dataclass(frozen=True, kw_only=True)
class Study:
    """Attributes:
    about: one line, with what it stands for in the paper.
    run: of so many seeds.
    """

    about: str
    run: Callable[[int, Say], Found]


def _specialisation(seeds: int, say: Say, stop_at: float = specialisation.STOP_AT) -> Found:
    return specialisation.found(list(specialisation.nets(seeds, stop_at, say)), stop_at)


def specialisation_at(stop_at: float) -> Study:
    """Nets that are compared at another accuracy."""
    return Study(
        about=STUDIES["specialisation"].about, run=lambda seeds, say: _specialisation(seeds, say, stop_at)
    )


def _faster_inference(seeds: int, say: Say) -> Found:
    model = faster_inference.wide_model()
    return faster_inference.found(model, faster_inference.measure(model, say))


STUDIES = {
    "capacity": Study(
        about="batch prioritized routing against vanilla where room is short (V-MoE, figures 5-6)",
        run=lambda seeds, say: operating.capacity(operating.choosers(seeds, say)),
    ),
    "k": Study(
        about="another number of experts per token than in training (V-MoE, appendix E.4)",
        run=lambda seeds, say: operating.choices(operating.choosers(seeds, say)),
    ),
    "random-router": Study(
        about="what a random router in one layer costs (V-MoE, appendix E.1)",
        run=lambda seeds, say: operating.random_router(operating.choosers(seeds, say)),
    ),
    "specialisation": Study(
        about="subsets of 2 to 16 experts: best, algorithm 1, random (Implicit Bias, figures 1-3 and 5)",
        run=_specialisation,
    ),
    "l2norm": Study(
        about="one expert cannot learn the length of a vector, five can (Implicit Bias, figure 4)",
        run=l2norm.l2norm,
    ),
    "faster-inference": Study(
        about="time against the experts that run, batch 1 and 100 (Implicit Bias, table 3)",
        run=_faster_inference,
    ),
}
