"""What is wrong with a backbone, a checkpoint or the examples, in words for whoever gave them."""


class LearnedError(ValueError):
    """`what` was wrong, and what to do."""


class BackboneError(LearnedError):
    """A backbone that cannot be loaded, or whose tokenizer is another model's."""


class CheckpointError(LearnedError):
    """A checkpoint that is not whole, or that does not fit what it is to be used with."""


class TooFewError(LearnedError):
    """Too few examples to train on."""


class TranscriptFileError(LearnedError):
    """A line that is no transcript, or a file that holds none."""


class TrainingError(LearnedError):
    """What a training was begun with is not what it is to go on with."""
