"""Error of the learned predictor."""


class LearnedError(ValueError):
    """A file, backbone, checkpoint or training that cannot be used; the message states what is
    wrong and what to do."""
