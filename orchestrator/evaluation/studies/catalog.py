"""The studies by name; `jobs/study.py` says what each stands for."""

from collections.abc import Callable

from orchestrator.evaluation.studies import faster_inference, l2norm, operating, specialisation
from orchestrator.evaluation.studies.found import Found, Say

Study = Callable[[int, Say], Found]  # called with the number of seeds


def specialisation_at(stop_at: float) -> Study:
    """The study of nets that are compared at this accuracy of all experts."""
    return lambda seeds, say: specialisation.found(list(specialisation.nets(seeds, stop_at, say)), stop_at)


def _faster_inference(_: int, say: Say) -> Found:
    model = faster_inference.wide_model()
    return faster_inference.found(model, faster_inference.measure(model, say))


STUDIES: dict[str, Study] = {
    "capacity": lambda seeds, say: operating.capacity(operating.choosers(seeds, say)),
    "k": lambda seeds, say: operating.choices(operating.choosers(seeds, say)),
    "random-router": lambda seeds, say: operating.random_router(operating.choosers(seeds, say)),
    "specialisation": specialisation_at(specialisation.STOP_AT),
    "l2norm": l2norm.l2norm,
    "faster-inference": _faster_inference,
}
