"""Trackers: projections of the directories of runs and sweeps. Only this package knows MLflow. To add another
kind, write its file and import its config here: it joins by its kind.
"""

from orchestrator.tracking.base import Follower, TrackerConfig
from orchestrator.tracking.tensorboard import TensorBoardConfig

__all__ = ["Follower", "TensorBoardConfig", "TrackerConfig"]
