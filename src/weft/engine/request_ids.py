"""The default generator of request ids."""

from __future__ import annotations

from weft.request import RequestId


def new_request_id() -> RequestId:
    """A random UUID, in hexadecimal digits."""
    import uuid  # imported here: the import is slow, and an engine whose requests have ids never needs it

    return RequestId(uuid.uuid4().hex)
