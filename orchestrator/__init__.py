"""Find the vision mixture-of-experts model that is worth its cost: train runs and sweeps, load their models.

    from moe import MoEConfig, SoftConfig
    from orchestrator import RunConfig, Sweep, run_sweep

    arms = {"dense": {}, "soft": MoEConfig(router=SoftConfig()), "wide": {"model.width": 64}}
    frontier = run_sweep(Sweep(base=RunConfig(name="demo"), arms=arms))
    model = frontier.knee.load()

Names are imported when they are first used, so that `import orchestrator` stays cheap; ``__init__.pyi`` lists
them.
"""

import os

from moe.lazy import attach

# Set before torch is loaded, which reads it. Threads that wait for each other at the end of a matmul release
# their core after about 50 us. The default of several ms keeps it from other processes and threads, even from
# the threads that they wait for (measured: bench/results/threads.json).
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

__getattr__, __dir__, __all__ = attach(__name__, __file__)
