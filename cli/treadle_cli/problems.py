"""Define the error that a user can correct, shared by all commands."""


class UsageProblem(Exception):  # noqa: N818 - it is for the user to solve
    """Raised where the user can correct something. The message names what is missing or wrong and
    what to do; the command prints it and exits with 2."""
