"""The entries that the server adds to the scope of a request."""

from __future__ import annotations

KEY = "weft.key"
"""Scope entry with the `ApiKey` of a request; None if the server needs no key."""
BODY = "weft.body"
"""Scope entry with the `RequestBytes` of the body."""
ANSWER = "weft.answer"
"""Scope entry with the `RequestBytes` of the answers."""
OLLAMA_PORT = "weft.ollama_port"
"""Scope entry that is true for requests that came in through the second port (`ollama_port`)."""
RECORD = "weft.record"
"""Scope entry with the `Record` of the request for the log."""
