"""The names that `from orchestrator import ..` and `from moe import ..` offer."""

from types import ModuleType

import pytest

import moe
import orchestrator


@pytest.mark.parametrize("package", [moe, orchestrator], ids=lambda package: package.__name__)
def test_every_public_name_is_there_and_described(package: ModuleType) -> None:
    for name in package.__all__:
        assert getattr(package, name).__doc__, name


def test_each_name_is_listed_with_its_module() -> None:
    assert {*orchestrator._HOMES} == {*orchestrator.__all__} <= {*dir(orchestrator)}
