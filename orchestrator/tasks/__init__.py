"""Tasks: the contract, classification, contrastive learning, and prediction of the next token."""

from orchestrator.tasks.base import TaskConfig
from orchestrator.tasks.classification import ClassificationConfig
from orchestrator.tasks.contrastive import ContrastiveConfig
from orchestrator.tasks.next_token import NextTokenConfig

__all__ = ["ClassificationConfig", "ContrastiveConfig", "NextTokenConfig", "TaskConfig"]
