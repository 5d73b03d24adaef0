"""The rule for names of runs, which are directories below the storage."""

import re

from orchestrator.errors import UsageError

RESERVED = (  # names below the storage that no run may have
    "data",
    "evaluation",
    "features",
    "mlartifacts",
    "mlflow.db",
    "operating-points",
    "reports",
    "routing",
    "studies",
)


def run_name(text: str) -> str:
    """Returns the name. Raises UsageError if it cannot be a directory of its own below the storage."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", text, re.ASCII):
        raise UsageError(f"{text!r}: begin with a letter or digit, and use letters, digits, '.', '_' and '-'")
    if text in RESERVED or text.startswith("mlflow.db"):
        raise UsageError(f"{text!r} is reserved, as are {', '.join(RESERVED)}")
    return text


def check_run_path(text: str) -> None:
    """Raises UsageError if the text is not the name of a run, or of one below it: ``sweep/trials/arm``."""
    name, *below = text.split("/")
    try:
        run_name(name)
    except UsageError as error:
        raise UsageError(f"name {text!r}: {error}" if below else f"name {error}") from None
    for part in below:
        if not re.fullmatch(r"[A-Za-z0-9][\w.@+-]*", part):
            raise UsageError(f"name {text!r}: {part!r} cannot be the name of a directory")
