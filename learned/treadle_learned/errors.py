"""Errors of the learned predictor. Each message says what is wrong and what to do about it."""


class LearnedError(ValueError):
    """Base of all errors here."""


class BackboneError(LearnedError):
    """A backbone cannot be loaded, or its tokenizer is another model's."""


class CheckpointError(LearnedError):
    """A checkpoint is not whole, or does not fit what it is to be used with."""


class TooFewError(LearnedError):
    """There are too few questions to train on."""


class TranscriptFileError(LearnedError):
    """A line is no transcript, or a file holds none."""


class TrainingError(LearnedError):
    """The options of a training do not fit each other, or there is already a checkpoint."""
