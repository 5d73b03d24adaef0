"""The names that `from orchestrator import ..` offers."""

import orchestrator


def test_every_public_name_is_there_and_described() -> None:
    for name in orchestrator.__all__:
        assert getattr(orchestrator, name).__doc__, name
