"""The tool `file_search`: searches vector stores before an answer is generated.

    tools, last text of the user -> planned_search -> FileSearch -> with_sources -> with_passages: into the prompt
                                                                         `-> the call, its results, and the citations

The model is not asked whether to search: small models rarely make a good call, and a second pass over the prompt would
double the wait. A stream begins before the search, since the embedding model may have much to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec

from weft.memory.prompting import Source, citations, question_with_passages
from weft.server.api import schema
from weft.server.api.vector_store_shapes import RankingOptions, checked_count, checked_filter, checked_ranking
from weft.server.errors import refusal
from weft.server.memory.search import SearchRequest
from weft.text.conversation import Item, Message

if TYPE_CHECKING:
    from weft.server.api.services import Caller

KIND = "file_search"
_MAX_STORES = 16
_DEFAULT_RESULTS = 5
"""Passages that a search returns by default. The OpenAI API returns 20, too many for the context of small models."""
_QUERY_CHARACTERS = 4096
_PROMPT_PART = 2
"""Passages may take 1/2 of the context."""
_CHARACTERS_PER_TOKEN = 3


class FileSearchTool(msgspec.Struct, frozen=True):
    vector_store_ids: list[str]
    filters: dict[str, Any] | None = None
    max_num_results: int | None = None
    ranking_options: RankingOptions | None = None


@dataclass(frozen=True)
class FileSearch:
    """A search for one answer."""

    asked: SearchRequest
    sources: Sequence[Source] | None = None
    """The passages that were found. None: the search has not run."""

    @property
    def is_pending(self) -> bool:
        return self.sources is None

    async def with_sources(self, caller: Caller) -> FileSearch:
        """Runs the search."""
        found = await caller.services.memory.search(self.asked)
        return replace(self, sources=_within_context(found, caller.services.engine.max_sequence_length))

    def call(self, call_id: str, status: str, *, with_results: bool) -> dict[str, Any]:
        """The item `file_search_call`."""
        results = [
            {
                "file_id": one.file_id,
                "filename": one.name,
                "score": one.score,
                "attributes": one.attributes,
                "text": one.text,
                **one.span,
            }
            for one in self.sources or ()
        ]
        return {
            "id": call_id,
            "type": "file_search_call",
            "status": status,
            "queries": list(self.asked.queries),
            "results": results if with_results else None,
        }

    def annotations(self, answer: str) -> list[dict[str, Any]]:
        """The citations in an answer, in the form of the OpenAI API."""
        return [
            {
                "type": "file_citation",
                "index": one.offset,
                "file_id": one.source.file_id,
                "filename": one.source.name,
            }
            for one in citations(answer, self.sources or ())
        ]


def is_file_search(tool: Any) -> bool:
    return isinstance(tool, Mapping) and tool.get("type") == KIND


async def planned_search(
    tools: Sequence[Any], tool_choice: Any, items: Sequence[Item], caller: Caller
) -> FileSearch | None:
    """The search of the tool `file_search` for the last text of the user. None: there is no such tool, or no question,
    or tool_choice forbids tools. Raises ApiError if the tool is invalid, or a vector store does not exist."""
    given = [(f"tools[{index}]", tool) for index, tool in enumerate(tools) if is_file_search(tool)]
    if not given:
        return None
    if len(given) > 1:
        raise refusal(f"tools has {len(given)} tools of the type file_search; send one", given[1][0])
    asked = _checked(*given[0], caller)
    last = _last_question(items)
    if tool_choice == "none" or last is None:
        return None
    search = FileSearch(asked(_text(items[last])[-_QUERY_CHARACTERS:]))
    await caller.services.memory.check(search.asked)
    return search


def with_passages(items: Sequence[Item], search: FileSearch | None) -> list[Item]:
    """The conversation with the passages in front of the last question. Before the search, it is unchanged."""
    last = _last_question(items)
    if search is None or search.sources is None or last is None:
        return list(items)
    message = items[last]
    assert isinstance(message, Message)
    asked = msgspec.structs.replace(message, content=question_with_passages(_text(message), search.sources))
    return [*items[:last], asked, *items[last + 1 :]]


def _checked(where: str, tool: Mapping[str, Any], caller: Caller) -> Callable[[str], SearchRequest]:
    """Checks the tool. Returns a function that makes the search request for a query."""
    # Chat completions have the fields of a tool in an object with the name of its type.
    inner = tool.get(KIND)
    given = schema.converted(inner if isinstance(inner, Mapping) else tool, FileSearchTool, where)
    if not 1 <= len(given.vector_store_ids) <= _MAX_STORES:
        param = f"{where}.vector_store_ids"
        raise refusal(f"{param} has {len(given.vector_store_ids)} ids; allowed: 1 to {_MAX_STORES}", param)
    count = checked_count(given.max_num_results or _DEFAULT_RESULTS, f"{where}.max_num_results")
    chosen = checked_filter(given.filters, f"{where}.filters")
    ranking = checked_ranking(given.ranking_options, f"{where}.ranking_options")

    def request(query: str) -> SearchRequest:
        return SearchRequest(
            caller.owner,
            given.vector_store_ids,
            [query],
            count,
            chosen,
            **ranking,
            client_id=caller.owner,
            request_id=caller.request_id,
        )

    return request


def _last_question(items: Sequence[Item]) -> int | None:
    """The index of the last message of the user that has text."""
    for index in range(len(items) - 1, -1, -1):
        item = items[index]
        if isinstance(item, Message) and item.role == "user" and _text(item).strip():
            return index
    return None


def _text(item: Item) -> str:
    content = item.content if isinstance(item, Message) else ""
    return content if isinstance(content, str) else "\n".join(content or ())


def _within_context(sources: Sequence[Source], max_tokens: int) -> list[Source]:
    """The best passages that leave room for the conversation; at least one."""
    room = max_tokens * _CHARACTERS_PER_TOKEN // _PROMPT_PART
    found: list[Source] = []
    for one in sources:
        room -= len(one.text)
        if room < 0 and found:
            break
        found.append(one)
    return found
