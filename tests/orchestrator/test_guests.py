"""The product without its guests."""

import pytest

from tests.jobs.bare import run_bare

LIST = """
import runpy, sys
sys.modules["papers"] = None
from moe.presets import PRESETS
for name in [*PRESETS][1:]:
    del PRESETS[name]  # their costs take half a minute
sys.argv = ["pareto_sweep.py", "--list"]
runpy.run_path("jobs/pareto_sweep.py", run_name="__main__")
from orchestrator.frontier.published import DRAWABLE, published
from orchestrator.sweeps.catalog import SCALES, SWEEPS
print(*SWEEPS, *SCALES, DRAWABLE, published("imagenet/acc1", "cost/params"))
"""


@pytest.mark.smoke
def test_without_the_papers_the_product_has_its_own_sweeps_and_scales() -> None:
    done = run_bare("-c", LIST)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "quickstart study modern upcycle language tiny cifar {} ()"
