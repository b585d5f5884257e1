"""The errors that a caller of weft should handle. The command line prints each as one line and exits with its code."""


class WeftError(Exception):
    """Base class of all expected errors. The message says what was wrong, with the numbers, and what to do."""

    exit_code = 1


class InvalidRequestError(WeftError, ValueError):
    """A request or an option is invalid and was refused before any work was done.

    `field` is the name of the invalid field ("" if none). `code` is for programs, such as "context_length_exceeded".
    """

    exit_code = 2

    def __init__(self, message: str, field: str = "", code: str = "invalid_value") -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class PromptTooLongError(InvalidRequestError):
    """A prompt has more tokens than the context allows. `num_tokens`: how many it has at least. `most`: the limit."""

    def __init__(self, message: str, field: str, num_tokens: int, most: int) -> None:
        super().__init__(message, field, "context_length_exceeded")
        self.num_tokens = num_tokens
        self.most = most


def id_in_use(request_id: str) -> InvalidRequestError:
    """The error for a request whose id belongs to another request that has not ended."""
    message = f"request_id {request_id!r} belongs to a request that has not ended; send another id, or none"
    return InvalidRequestError(message, field="request_id", code="request_id_in_use")


class ModelFileError(WeftError):
    """A model could not be found, fetched or read. The message names the file and the invalid part."""

    exit_code = 2


class OutOfMemoryError(WeftError):
    """A model, its KV cache or its swap space needs more memory than is free."""

    exit_code = 2


class QueueFullError(WeftError):
    """The waiting queue is full. Submit again after a request has ended."""


class EngineStoppedError(WeftError):
    """The engine was stopped and accepts no more requests."""
