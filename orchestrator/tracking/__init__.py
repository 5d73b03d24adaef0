"""MLflow: a projection of the directories of runs and sweeps. Only this package knows it."""
