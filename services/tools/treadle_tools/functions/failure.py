"""What goes wrong with a call of a function."""


class CallFailed(Exception):  # noqa: N818 - what happened, as callers speak of it
    """There is no answer; the message says why.

    again: the call may be sent again. retry_after_s: not before so many seconds, where that was said. tries: begun.
    timed_out: the caller's time was up.
    """

    def __init__(self, message: str, *, again: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.again = again
        self.retry_after_s = retry_after_s
        self.tries = 1
        self.timed_out = False
