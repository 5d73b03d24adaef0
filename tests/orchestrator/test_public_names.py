"""The names that `from orchestrator import ..` and `from moe import ..` offer."""

from pathlib import Path
from types import ModuleType

import pytest

import moe
import orchestrator


@pytest.mark.parametrize("package", [moe, orchestrator], ids=lambda package: package.__name__)
def test_every_public_name_is_there_and_described(package: ModuleType) -> None:
    for name in package.__all__:
        assert getattr(package, name).__doc__, name


def test_a_function_is_found_beside_a_module_of_its_name() -> None:
    """`lazy_loader` gives a module in place of a function that has its name, if the module is loaded."""
    for package in (moe, orchestrator):
        modules = {path.stem for path in Path(package.__file__ or "").parent.iterdir()}
        assert not modules & {*package.__all__}
