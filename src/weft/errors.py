"""The errors a caller of weft is expected to handle; the command line prints each as one line and exits with its code."""


class WeftError(Exception):
    """Base of every expected error. Its message says what was wrong, with the numbers, and what to do about it."""

    exit_code = 1


class InvalidRequestError(WeftError, ValueError):
    """A request or an option was refused before any work was done.

    `field` names the offending one ("" if none); `code` is for programs, such as "context_length_exceeded".
    """

    exit_code = 2

    def __init__(self, message: str, field: str = "", code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class ModelFileError(WeftError):
    """A model could not be found, fetched, or read; the message names the file and the part of it that is wrong."""

    exit_code = 2


class OutOfMemoryError(WeftError):
    """A model, its KV cache or its swap space is larger than the memory that is free."""

    exit_code = 2


class QueueFullError(WeftError):
    """The waiting queue has reached its bound; submit again once something has finished."""


class EngineStoppedError(WeftError):
    """The engine has been stopped and takes no more requests."""
