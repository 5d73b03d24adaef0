"""The flags of commands that pages name, read as the jobs read them."""

import importlib
import sys
from typing import Any

import pytest

from jobs.evaluate import EvaluateFlags
from jobs.pareto_sweep import SweepFlags
from jobs.predict import PredictFlags
from jobs.train import RunFlags, preset
from moe.codec import to_dict
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.evaluation.points import parse_point


class Parsed(Exception):
    """Ends a command once its flags are read."""


def flags_of(job: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The flags that a command, ``train`` or ``papers.jobs.study``, reads from these words."""
    module = importlib.import_module(job if "." in job else f"jobs.{job}")
    parse = module.parse
    found = []

    def record(*args: Any, **options: Any) -> None:
        found.append(parse(*args, **options))
        raise Parsed

    with monkeypatch.context() as patch:
        patch.setattr(module, "parse", record)
        if hasattr(module, "early"):  # plugins of a page are no files here
            patch.setattr(module, "early", lambda name: [])
        patch.setattr(sys, "argv", [job, *words])
        with pytest.raises(Parsed):
            module.main()
    return found[0]


def check_settings(flags: Any) -> None:
    """Fails for a field that --set does not know, or a value that it refuses."""
    run = flags.run if isinstance(flags, SweepFlags) else flags
    if isinstance(flags, EvaluateFlags | PredictFlags):
        parse_point(getattr(flags if isinstance(flags, PredictFlags) else flags.how, "set", ()))
    elif hasattr(run, "set"):
        changes = {field: value for field, value in run.set if field != "help"}
        if isinstance(run, RunFlags) and run.init_from:
            changes["train.init_from"] = run.init_from
        if isinstance(flags, SweepFlags):
            flags.named_sweep(changes)
        else:
            if isinstance(flags, RunFlags) and flags.model:
                changes["model"] = to_dict(preset(flags.model))
            override(RunConfig(), changes)
