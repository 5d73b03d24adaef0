"""The evaluations. To add one, write its file and import its config here: it joins by its kind.

Importing them loads no large library, because `evaluate --help` shows their fields.
"""

from importlib import import_module

from moe.guests import offered
from orchestrator.evaluation.base import EvaluationConfig
from orchestrator.evaluation.kinds.grid import GridConfig
from orchestrator.evaluation.kinds.scores import ScoresConfig
from orchestrator.evaluation.kinds.shots import ShotsConfig

for module in offered("EVALUATIONS").values():
    import_module(module)

__all__ = ["EvaluationConfig", "GridConfig", "ScoresConfig", "ShotsConfig"]
