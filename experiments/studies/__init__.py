"""Claims of the papers about trained routers, trained and measured here on digits in minutes."""

from collections.abc import Callable

from experiments.studies import faster_inference, l2norm, specialisation, vmoe_inference
from experiments.studies._result import StudyResult

STUDIES: dict[str, Callable[..., StudyResult]] = {  # called with the number of seeds and a ProgressFn
    "capacity": lambda *args: vmoe_inference.capacity(vmoe_inference.train_models(*args)),
    "k": lambda *args: vmoe_inference.choices(vmoe_inference.train_models(*args)),
    "random-router": lambda *args: vmoe_inference.random_router(vmoe_inference.train_models(*args)),
    "specialisation": specialisation.specialise,
    "l2norm": l2norm.learn_length,
    "faster-inference": faster_inference.time_experts,
}
