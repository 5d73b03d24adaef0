"""The optimisers. To add one, write its file and import its config here: it joins by its kind."""

from orchestrator.optimizers.adafactor import AdafactorConfig
from orchestrator.optimizers.adamw import AdamWConfig
from orchestrator.optimizers.base import OptimizerConfig
from orchestrator.optimizers.lamb import LambConfig
from orchestrator.optimizers.sgd import SGDConfig

__all__ = ["AdafactorConfig", "AdamWConfig", "LambConfig", "OptimizerConfig", "SGDConfig"]
