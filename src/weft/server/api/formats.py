"""The routes that generate, and their API formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.server.api.answer_format import AnswerFormat
from weft.server.api.chat import ChatFormat
from weft.server.api.completion import CompletionFormat

Formats = Mapping[str, AnswerFormat[Any]]
"""By path."""

FORMATS: Formats = {
    "/v1/chat/completions": ChatFormat(),
    "/v1/completions": CompletionFormat(),
}
