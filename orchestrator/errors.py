"""The errors that a user can correct, and one line for any other error."""


class UsageError(ValueError):
    """Wrong input. The message names the value, the bound and what to do."""


class BudgetExhausted(UsageError):
    """The budget does not hold what is left to do."""


def reason_of(error: BaseException | None) -> str:
    """Returns the last line of an error, which names the cause in a remote traceback."""
    return last_line(str(error)) or repr(error)


def last_line(text: str) -> str:
    """Returns the last line that is not blank, or an empty string."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
