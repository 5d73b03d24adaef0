"""Trackers: projections of the directories of runs and sweeps. Only this package knows MLflow. To add another
kind, write its file and name its config, which ends in ``Config``, in ``__init__.pyi``: it joins by its kind.

Names are imported when they are first used: MLflow takes seconds to load.
"""

from moe.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
