"""The error that a user can mend. Imports nothing: commands raise it before anything is loaded."""


class UsageError(ValueError):
    """A mistake of the user: commands print its message alone, without a traceback, and exit with code 1."""
