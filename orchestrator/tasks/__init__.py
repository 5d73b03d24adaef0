"""Tasks: the contract, classification and contrastive learning."""

from orchestrator.tasks.base import TaskConfig
from orchestrator.tasks.classification import ClassificationConfig
from orchestrator.tasks.contrastive import ContrastiveConfig

__all__ = ["ClassificationConfig", "ContrastiveConfig", "TaskConfig"]
