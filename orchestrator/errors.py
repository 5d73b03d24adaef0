"""Errors that a user can mend, and one line for any other."""


class UsageError(ValueError):
    """Wrong input. The message names the value, the bound and the way out."""


def reason_of(error: BaseException | None) -> str:
    """The last line of an error, which in a remote traceback is the one that names it."""
    return last_line(str(error)) or repr(error)


def last_line(text: str) -> str:
    """The last line that is not blank; empty if all are."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
