"""Directories of checkpoints."""

from pathlib import Path

import pytest


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A directory of checkpoints that does not exist yet."""
    if request.param == "s3":
        return request.getfixturevalue("bucket").uri("runs/soft/checkpoints")
    return str(tmp_path / "runs/soft/checkpoints")
