"""Tasks: the contract, and classification."""

from orchestrator.tasks.base import TaskConfig
from orchestrator.tasks.classification import ClassificationConfig

__all__ = ["ClassificationConfig", "TaskConfig"]
