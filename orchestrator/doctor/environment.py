"""What variables and files of the user do to Ray and MLflow. `environ` is that of the command."""

import os
import stat
import tempfile
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from urllib.request import proxy_bypass_environment  # pyright: ignore[reportAttributeAccessIssue]

from orchestrator.doctor.report import Finding, fail, ok, warn

Environ = Mapping[str, str]
SHORTEST_TOKEN = 16
PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")


def check_variables(environ: Environ) -> Finding:
    """Variables that change what runs do, without a word."""
    if environ.get("MLFLOW_RUN_ID"):
        return fail("MLFLOW_RUN_ID is set: every process writes into that run", "unset MLFLOW_RUN_ID")
    if environ.get("RAY_TRAIN_V2_ENABLED", "1").lower() in ("0", "false"):
        return fail("RAY_TRAIN_V2_ENABLED=0: training needs Ray Train V2", "unset RAY_TRAIN_V2_ENABLED")
    if environ.get("RAY_memory_monitor_refresh_ms") == "0":
        return warn(
            "RAY_memory_monitor_refresh_ms=0: a full memory ends any process, also Ray's own",
            "unset it, where it was not set to spare a machine that others share",
        )
    return ok("none that changes what runs do")


def check_proxies(environ: Environ, tracking_uri: str) -> Finding:
    """A proxy in front of this machine, or of the tracking server on it, answers instead of them."""
    proxies = [name for name in PROXIES if environ.get(name)]
    if not proxies:
        return ok("no proxy")
    around = {"no": environ.get("no_proxy") or environ.get("NO_PROXY") or ""}
    server = urllib.parse.urlsplit(tracking_uri).hostname if tracking_uri.startswith("http") else None
    behind = [
        host
        for host in dict.fromkeys(("127.0.0.1", "localhost", server))
        if host and not proxy_bypass_environment(host, around)
    ]
    if behind:
        return warn(
            f"{', '.join(proxies)} stands in front of {', '.join(behind)}",
            f"export no_proxy={','.join(behind)} NO_PROXY={','.join(behind)}",
        )
    return ok(f"{', '.join(proxies)}, not in front of this machine")


def check_home(environ: Environ) -> Finding:
    """Ray's default token and the default storage lie there."""
    home = environ.get("HOME") or str(Path.home())
    try:
        with tempfile.TemporaryFile(dir=home):
            return ok(f"{home} can be written to")
    except OSError as error:
        return warn(
            f"HOME={home} cannot be written to: {error.strerror}",
            "set HOME, or RAY_AUTH_TOKEN_PATH and --storage, to where it can",
        )


def check_token(environ: Environ) -> Finding:
    """Ray reads them once, as it is imported: the mode, and from where it takes the token."""
    mode = environ.get("RAY_AUTH_MODE", "").lower()
    address = environ.get("RAY_ADDRESS", "")
    joins = address not in ("", "auto", "local")
    if mode not in ("", "token", "disabled"):
        return fail(f"RAY_AUTH_MODE={mode} is none of token, disabled", "export RAY_AUTH_MODE=token")
    if mode == "disabled":
        return warn(
            "RAY_AUTH_MODE=disabled: whoever reaches Ray's ports runs code as you",
            "export RAY_AUTH_MODE=token on every side, before Ray starts",
        )
    where, token = token_of(environ)
    if token is None:
        named = bool(environ.get("RAY_AUTH_TOKEN_PATH"))
        if named or (joins and mode == "token"):
            return fail(
                f"no token: {where} is not there or empty",
                "copy the head's token there, or name its file with RAY_AUTH_TOKEN_PATH",
            )
        return ok("no token yet: a Ray that is started here makes one")
    if len(token) < SHORTEST_TOKEN:
        return warn(f"the token of {where} has {len(token)} characters", "ray get-auth-token --generate")
    if where != "RAY_AUTH_TOKEN" and (bits := stat.S_IMODE(os.stat(where).st_mode)) & 0o077:
        return warn(f"others may read {where} (mode {bits:04o})", f"chmod 600 {where}")
    if joins and not mode:
        return warn(
            f"RAY_AUTH_MODE is not set: with RAY_ADDRESS, Ray does not use the token of {where}",
            "export RAY_AUTH_MODE=token",
        )
    return ok(f"token of {where}")


def token_of(environ: Environ) -> tuple[str, str | None]:
    """Where Ray takes its token from, in its order, and the token; None if it is not there or empty."""
    if token := environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN", token
    default = Path(environ.get("HOME") or Path.home(), ".ray", "auth_token")
    path = environ.get("RAY_AUTH_TOKEN_PATH") or str(default)
    try:
        return path, Path(path).read_text().strip() or None
    except OSError:
        return path, None
