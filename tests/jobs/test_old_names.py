"""Commands under the names that they had before: each says what it is now, and does it."""

from pathlib import Path

import pytest

from jobs._main import OLD
from tests.jobs.bare import run_bare

MAIN = "from jobs._main import main; main()"


@pytest.mark.parametrize("name", sorted(OLD))
def test_an_old_name_is_the_new_one_with_flags(name: str) -> None:
    """Both as a file and as a word of `moe-frontier`. Help knows the new flags and says the new name."""
    now = OLD[name]
    assert Path(f"jobs/{now[0]}.py").is_file()
    for words, prefix in (
        ([f"jobs/{name}.py"], f"jobs/{name}.py"),
        (["-c", MAIN, name], f"moe-frontier {name}"),
    ):
        said = run_bare(*words, "--help")
        assert said.returncode == 0, said.stderr
        assert said.stderr.startswith(f"{prefix} is now: ")
        assert now[0] in said.stdout.splitlines()[0]
