"""The profile of a real run: its parts are those of the loop, and they add up."""

import csv
import gzip
import json

import pytest
from PIL import Image

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.runs.run_directory import PROFILE, PROFILE_PICTURE
from orchestrator.training.fit import fit
from orchestrator.training.profile import PARTS, PHASES, SKIPPED, TRACE

STEPS = 4


@pytest.fixture(scope="module")
def profile(digits, tmp_path_factory):
    """Every fourth step reports and saves: one of the four that are profiled."""
    home = tmp_path_factory.mktemp("home")
    changes = {"name": "run", "storage": str(home), "data.path": digits, "scale.profile_steps": STEPS}
    changes |= {"model.moe.router.kind": "soft", "model.moe.num_experts": 4}
    changes |= {"train.steps": SKIPPED + STEPS + 4, "train.report_every": 4, "checkpoint.every": 4}
    fit(override(RunConfig(), changes), lambda step, metrics: None)
    rows = csv.DictReader((home / "run" / PROFILE).read_text().splitlines())
    return home / "run", {row["part"]: float(row["ms_per_step"]) for row in rows}


def test_the_parts_of_a_step_add_up(profile):
    _, ms = profile
    assert ms.keys() == {*PHASES, "other", "all_to_all", *PARTS, "step"}
    assert sum(ms[name] for name in (*PHASES, "other")) == pytest.approx(ms["step"], rel=1e-3)
    assert all(ms[name] > 0 for name in ("forward", "backward", "optimizer", "report", "checkpoint"))
    assert 0 <= ms["other"] < ms["step"] / 2
    assert ms["all_to_all"] == 0, "one worker sends nothing"


def test_the_parts_of_a_forward_pass_lie_within_it(profile):
    """Two blocks of attention, one of them with experts and one with an MLP; evaluations have theirs too."""
    _, ms = profile
    assert all(ms[name] > 0 for name in PARTS)
    assert sum(ms[name] for name in PARTS) < ms["forward"] + ms["evaluate"]


def test_the_picture_is_a_file_of_the_run(profile):
    directory, _ = profile
    with Image.open(directory / PROFILE_PICTURE) as picture:
        assert picture.size[0] == 960
        assert len(picture.convert("RGB").getcolors(1 << 20) or ()) > 10


def test_the_trace_has_just_those_steps(profile):
    directory, _ = profile
    events = json.loads(gzip.decompress((directory / TRACE).read_bytes()))["traceEvents"]
    steps = [event for event in events if event.get("name", "").startswith("ProfilerStep#")]
    assert len(steps) == STEPS
    assert sum(event.get("name") == "forward" for event in events) == STEPS
