"""The default generator of request ids."""

from __future__ import annotations

from weft.request import RequestId


def new_request_id() -> RequestId:
    """A random UUID, in hexadecimal digits."""
    import uuid  # slow to import, and an engine whose requests have ids does not need it

    return RequestId(uuid.uuid4().hex)
