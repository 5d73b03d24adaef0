"""Variables and files of the user, each planted."""

from pathlib import Path

import pytest

from orchestrator.doctor import environment

TOKEN = "0123456789abcdef"


def test_variables_that_change_what_runs_do() -> None:
    assert environment.check_variables({}).status == "ok"
    assert environment.check_variables({"MLFLOW_RUN_ID": "abc"}).status == "fail"
    assert environment.check_variables({"RAY_TRAIN_V2_ENABLED": "0"}).status == "fail"
    assert environment.check_variables({"RAY_memory_monitor_refresh_ms": "0"}).status == "warn"


def test_a_proxy_in_front_of_this_machine_or_the_server() -> None:
    proxy = {"http_proxy": "http://proxy:3128"}
    found = environment.check_proxies(proxy, "http://mlflow.lan:5000")
    assert found.status == "warn"
    assert "127.0.0.1, localhost, mlflow.lan" in found.found
    around = proxy | {"no_proxy": "127.0.0.1,localhost"}
    assert environment.check_proxies(around, "http://mlflow.lan:5000").found.endswith("front of mlflow.lan")
    assert environment.check_proxies(around, "sqlite:////home/mlflow.db").status == "ok"
    assert environment.check_proxies({}, "http://mlflow.lan:5000").status == "ok"


def test_a_home_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert environment.check_home({"HOME": str(tmp_path)}).status == "ok"
    assert environment.check_home({"HOME": str(tmp_path / "file/below")}).status == "warn"
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


def test_a_token_as_it_should_be(token: Path) -> None:
    environ = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    assert environment.check_token(environ).status == "ok"
    assert TOKEN not in environment.check_token(environ).found


def test_a_token_that_others_read(token: Path) -> None:
    token.chmod(0o644)
    found = environment.check_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})
    assert (found.status, found.way_out) == ("warn", f"chmod 600 {token}")


def test_no_token(tmp_path: Path) -> None:
    """On a laptop that never ran Ray there is none yet; where one is named or needed it must be there."""
    home = {"HOME": str(tmp_path)}
    assert environment.check_token(home).status == "ok"
    assert (
        environment.check_token(home | {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": "head:6379"}).status
        == "fail"
    )
    assert environment.check_token(home | {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}).status == "fail"


def test_modes(token: Path) -> None:
    """Ray uses no token towards an address that is named, unless the mode says so."""
    path = {"RAY_AUTH_TOKEN_PATH": str(token)}
    assert environment.check_token(path | {"RAY_AUTH_MODE": "disabled"}).status == "warn"
    assert environment.check_token(path | {"RAY_AUTH_MODE": "tokens"}).status == "fail"
    assert (
        environment.check_token(path | {"RAY_ADDRESS": "head:6379"}).way_out == "export RAY_AUTH_MODE=token"
    )
    assert environment.check_token(path | {"RAY_ADDRESS": "local"}).status == "ok"
