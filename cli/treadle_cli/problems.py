"""What stops a command for a reason that its user can put right."""


class UsageProblem(Exception):  # noqa: N818 - it is the user's to solve, not a fault
    """Something is missing or was asked for wrongly. The message says what to do; the command prints it and ends with
    2.
    """
