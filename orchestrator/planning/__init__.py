"""What runs and sweeps need, before they start: estimates, machines, and the checks of a sweep."""
