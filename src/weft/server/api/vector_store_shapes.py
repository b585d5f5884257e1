"""The types of `/v1/vector_stores`: bodies, their checks, and responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from weft.memory.documents import ChunkSize
from weft.memory.filters import Filter, parsed_filter
from weft.memory.prompting import Source
from weft.server.api.listing import Page
from weft.server.api.response_shapes import Shape
from weft.server.errors import refusal
from weft.server.memory.search import MAX_RESULTS
from weft.server.state.vector_stores import AttachedFile, FileBatch, FileCounts, FileStatus, VectorStore

MAX_FILES = 10_000
"""Maximum files of one vector store."""
MAX_FILES_AT_ONCE = 2000
MAX_STORES = 1000
"""Maximum vector stores of one API key."""
_MAX_ATTRIBUTES, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_MIN_CHUNK, _MAX_CHUNK = 100, 4096
_MAX_DAYS = 365
_MAX_NAME = 256
_MAX_QUERY = 4096
_MAX_QUERIES = 8
_DEFAULT_CHUNK = ChunkSize()

Value = str | float | bool
ATTRIBUTES = (
    f"At most {_MAX_ATTRIBUTES} entries: names of at most {_MAX_KEY} characters, values that are texts of at most "
    f"{_MAX_VALUE} characters, numbers or booleans."
)


class ExpiresAfter(msgspec.Struct, frozen=True):
    """When a vector store is deleted."""

    days: Annotated[int, Meta(description=f"Days after the last activity, 1 to {_MAX_DAYS}.")]
    anchor: Annotated[Literal["last_active_at"], Meta(description="Always last_active_at.")] = (
        "last_active_at"
    )


class StaticSizes(msgspec.Struct, frozen=True):
    max_chunk_size_tokens: int = _DEFAULT_CHUNK.max_tokens
    chunk_overlap_tokens: int = _DEFAULT_CHUNK.overlap_tokens


class ChunkingStrategy(msgspec.Struct, frozen=True, omit_defaults=True):
    """The length of passages in tokens of the embedding model. A value above what the model
    reads is reduced to that."""

    type: Annotated[Literal["auto", "static"], Meta(description="auto: 800 tokens, 400 of them repeated.")]
    static: Annotated[
        StaticSizes | None,
        Meta(description=f"Sizes: {_MIN_CHUNK} to {_MAX_CHUNK}; the overlap is at most half of it."),
    ] = None


class StoreRequest(msgspec.Struct, frozen=True):
    """A new vector store."""

    name: Annotated[str, Meta(description=f"At most {_MAX_NAME} characters.")] = ""
    file_ids: Annotated[list[str], Meta(description="Uploaded files to attach.")] = []
    chunking_strategy: Annotated[ChunkingStrategy | None, Meta(description="Of its files.")] = None
    expires_after: Annotated[ExpiresAfter | None, Meta(description="Default: never.")] = None
    metadata: Annotated[
        dict[str, str] | None,
        Meta(description="At most 16 entries, names of 64 and values of 512 characters."),
    ] = None
    description: Annotated[str | None, Meta(description="Accepted, without effect.")] = None


class StoreChange(msgspec.Struct, frozen=True):
    """New values for a vector store. What is left out stays."""

    name: Annotated[str | None, Meta(description=f"At most {_MAX_NAME} characters.")] = None
    expires_after: Annotated[ExpiresAfter | None, Meta(description="null: never.")] = None
    metadata: Annotated[dict[str, str] | None, Meta(description="Replaces the old one.")] = None


class FileRequest(msgspec.Struct, frozen=True):
    """A file to attach."""

    file_id: Annotated[str, Meta(description="The id of an uploaded file.")]
    attributes: Annotated[dict[str, Value] | None, Meta(description=ATTRIBUTES)] = None
    chunking_strategy: Annotated[ChunkingStrategy | None, Meta(description="Default: that of the store.")] = (
        None
    )


class FilesRequest(msgspec.Struct, frozen=True):
    """Files to attach together: their ids, or each with its own attributes."""

    file_ids: Annotated[list[str], Meta(description=f"At most {MAX_FILES_AT_ONCE}.")] = []
    files: Annotated[list[FileRequest], Meta(description="Instead of file_ids.")] = []
    attributes: Annotated[dict[str, Value] | None, Meta(description=ATTRIBUTES)] = None
    chunking_strategy: Annotated[ChunkingStrategy | None, Meta(description="Default: that of the store.")] = (
        None
    )


class AttributesChange(msgspec.Struct, frozen=True):
    """The attributes that a file has from now on."""

    attributes: Annotated[dict[str, Value] | None, Meta(description=ATTRIBUTES)]


class HybridWeights(msgspec.Struct, frozen=True):
    embedding_weight: float = 1.0
    text_weight: float = 1.0


class RankingOptions(msgspec.Struct, frozen=True):
    """How passages are ranked."""

    ranker: Annotated[
        str, Meta(description="none: no reranking model. Others: the one of the server, if any.")
    ] = "auto"
    score_threshold: Annotated[
        float,
        Meta(description="Least score of a result, 0 to 1; of a reranker, if one is used. 0 drops none."),
    ] = 0.0
    hybrid_search: Annotated[
        HybridWeights | None,
        Meta(description="Weights of the rankings by meaning and by words. Default: 1 and 1."),
    ] = None


class StoreSearch(msgspec.Struct, frozen=True):
    """A search in one vector store."""

    query: Annotated[
        str | list[str],
        Meta(description=f"A text of at most {_MAX_QUERY} characters, or up to {_MAX_QUERIES}."),
    ]
    filters: Annotated[
        dict[str, Any] | None,
        Meta(
            description='Over the attributes of files: {"type": "eq", "key": ..., "value": ...} with eq, ne, gt, gte, lt, '
            'lte, in or nin; {"type": "and", "filters": [...]} with and, or.'
        ),
    ] = None
    max_num_results: Annotated[int, Meta(description=f"1 to {MAX_RESULTS}.")] = 10
    ranking_options: Annotated[RankingOptions | None, Meta(description="How passages are ranked.")] = None
    rewrite_query: Annotated[bool, Meta(description="Accepted, without effect.")] = False


# ---------------------------------------------------------------------- answers


class Counts(Shape):
    in_progress: int
    completed: int
    failed: int
    cancelled: int
    total: int


class StoreObject(Shape):
    """A vector store."""

    id: str
    object: Literal["vector_store"]
    created_at: int
    name: str
    usage_bytes: int
    file_counts: Counts
    status: Annotated[
        Literal["in_progress", "completed"], Meta(description="in_progress: files are being read.")
    ]
    expires_after: ExpiresAfter | None
    expires_at: int | None
    last_active_at: int
    metadata: dict[str, str]


class StoreList(Page):
    data: list[StoreObject]


class FileProblem(Shape):
    code: Literal["server_error", "unsupported_file", "invalid_file"]
    message: str


class FileObject(Shape):
    """A file of a vector store."""

    id: str
    object: Literal["vector_store.file"]
    usage_bytes: int
    created_at: int
    vector_store_id: str
    status: FileStatus
    last_error: FileProblem | None
    chunking_strategy: ChunkingStrategy
    attributes: dict[str, Value]


class FilePage(Page):
    data: list[FileObject]


class FileBatchObject(Shape):
    """Files that were attached together."""

    id: str
    object: Literal["vector_store.files_batch"]
    created_at: int
    vector_store_id: str
    status: Literal["in_progress", "completed", "cancelled", "failed"]
    file_counts: Counts


class DeletedStore(Shape):
    id: str
    object: Literal["vector_store.deleted"]
    deleted: bool


class DeletedStoreFile(Shape):
    id: str
    object: Literal["vector_store.file.deleted"]
    deleted: bool


class TextContent(Shape):
    type: Literal["text"]
    text: str


class SearchResult(Shape):
    file_id: str
    filename: str
    score: Annotated[float, Meta(description="0 to 1. 1: first by meaning and by words.")]
    attributes: dict[str, Value]
    content: list[TextContent]
    start: Annotated[
        int,
        Meta(
            description="Where the passage begins: characters of the text of the file. Of HTML and PDF: of the text that "
            "was read from it. An extension of weft, as the next three."
        ),
    ]
    end: Annotated[int, Meta(description="Where the passage ends.")]
    heading: Annotated[str, Meta(description="The headings above it: `Install > On Linux`. Empty: none.")]
    page: Annotated[int | None, Meta(description="The page of a PDF on which it begins.")]


class SearchResults(Shape):
    object: Literal["vector_store.search_results.page"]
    search_query: list[str]
    data: list[SearchResult]
    has_more: bool
    next_page: str | None


class FileContent(Shape):
    object: Literal["vector_store.file_content.page"]
    data: list[TextContent]
    has_more: bool
    next_page: str | None


# ---------------------------------------------------------------------- checks


def checked_name(name: str) -> str:
    if len(name) > _MAX_NAME:
        raise refusal(f"name has {len(name)} characters; allowed: {_MAX_NAME}", "name")
    return name


def checked_days(given: ExpiresAfter | None) -> int | None:
    if given is not None and not 1 <= given.days <= _MAX_DAYS:
        raise refusal(f"expires_after.days is {given.days}; allowed: 1 to {_MAX_DAYS}", "expires_after.days")
    return None if given is None else given.days


def checked_entries(given: Mapping[str, Value] | None, param: str) -> dict[str, Any]:
    """Checks attributes or metadata, and returns them."""
    given = given or {}
    if len(given) > _MAX_ATTRIBUTES:
        raise refusal(f"{param} has {len(given)} entries; allowed: {_MAX_ATTRIBUTES}", param)
    for name, value in given.items():
        length = len(value) if isinstance(value, str) else 0
        if len(name) > _MAX_KEY or length > _MAX_VALUE:
            message = (
                f"{param} has {name!r:.80} of {len(name)} characters with a value of {length}; allowed: {_MAX_KEY} and "
                f"{_MAX_VALUE}"
            )
            raise refusal(message, param)
    return dict(given)


def checked_chunks(given: ChunkingStrategy | None) -> ChunkSize | None:
    """The length of passages that the client chose. None: the default."""
    if given is None or given.type == "auto":
        return None
    sizes = given.static or StaticSizes()
    most, overlap = sizes.max_chunk_size_tokens, sizes.chunk_overlap_tokens
    if not _MIN_CHUNK <= most <= _MAX_CHUNK:
        param = "chunking_strategy.static.max_chunk_size_tokens"
        raise refusal(f"{param} is {most}; allowed: {_MIN_CHUNK} to {_MAX_CHUNK}", param)
    if not 0 <= overlap <= most // 2:
        param = "chunking_strategy.static.chunk_overlap_tokens"
        raise refusal(
            f"{param} is {overlap}; allowed: 0 to {most // 2}, half of max_chunk_size_tokens", param
        )
    return ChunkSize(most, overlap)


def checked_count(given: int, param: str = "max_num_results") -> int:
    if not 1 <= given <= MAX_RESULTS:
        raise refusal(f"{param} is {given}; allowed: 1 to {MAX_RESULTS}", param)
    return given


def checked_queries(given: str | Sequence[str]) -> list[str]:
    queries = [given] if isinstance(given, str) else list(given)
    if not 1 <= len(queries) <= _MAX_QUERIES:
        raise refusal(f"query has {len(queries)} texts; allowed: 1 to {_MAX_QUERIES}", "query")
    for query in queries:
        if not query.strip():
            raise refusal("query is empty; send what to look for", "query")
        if len(query) > _MAX_QUERY:
            raise refusal(f"query has {len(query)} characters; allowed: {_MAX_QUERY}", "query")
    return queries


def checked_ranking(given: RankingOptions | None, where: str = "ranking_options") -> dict[str, Any]:
    """The fields of `SearchRequest` for ranking options."""
    given = given or RankingOptions()
    weights = given.hybrid_search or HybridWeights()
    for name, value, most in (
        ("score_threshold", given.score_threshold, 1.0),
        ("hybrid_search.embedding_weight", weights.embedding_weight, 1e6),
        ("hybrid_search.text_weight", weights.text_weight, 1e6),
    ):
        if not 0 <= value <= most:
            raise refusal(f"{where}.{name} is {value}; allowed: 0 to {most:g}", f"{where}.{name}")
    if not weights.embedding_weight and not weights.text_weight:
        raise refusal(
            f"{where}.hybrid_search has two weights of 0; one must be above", f"{where}.hybrid_search"
        )
    return {
        "score_threshold": given.score_threshold,
        "vector_weight": weights.embedding_weight,
        "words_weight": weights.text_weight,
        "reranks": given.ranker != "none",
    }


def checked_filter(given: Mapping[str, Any] | None, where: str = "filters") -> Filter | None:
    return None if given is None else parsed_filter(given, where)


# ---------------------------------------------------------------------- objects


def described_store(store: VectorStore, counts: FileCounts) -> dict[str, Any]:
    days = store.details.expires_days
    return {
        "id": store.id,
        "object": "vector_store",
        "created_at": int(store.created_at),
        "name": store.name,
        "usage_bytes": counts.num_bytes,
        "file_counts": _counts(counts),
        "status": "in_progress" if counts.in_progress else "completed",
        "expires_after": None if days is None else {"anchor": "last_active_at", "days": days},
        "expires_at": None if store.expires_at is None else int(store.expires_at),
        "last_active_at": int(store.last_active_at),
        "metadata": store.details.metadata,
    }


def described_file(file: AttachedFile, store: VectorStore) -> dict[str, Any]:
    size = file.details.chunk_size or store.details.chunk_size or _DEFAULT_CHUNK
    error = file.details.error
    return {
        "id": file.id,
        "object": "vector_store.file",
        "usage_bytes": file.num_bytes,
        "created_at": int(file.created_at),
        "vector_store_id": store.id,
        "status": file.status,
        "last_error": None if error is None else {"code": error.code, "message": error.message},
        "chunking_strategy": {
            "type": "static",
            "static": {"max_chunk_size_tokens": size.max_tokens, "chunk_overlap_tokens": size.overlap_tokens},
        },
        "attributes": file.details.attributes,
    }


def described_batch(batch: FileBatch, store: VectorStore, counts: FileCounts) -> dict[str, Any]:
    status = "cancelled" if batch.is_cancelled else "in_progress" if counts.in_progress else "completed"
    if status == "completed" and counts.failed and not counts.completed:
        status = "failed"
    return {
        "id": batch.id,
        "object": "vector_store.files_batch",
        "created_at": int(batch.created_at),
        "vector_store_id": store.id,
        "status": status,
        "file_counts": _counts(counts),
    }


def described_result(source: Source) -> dict[str, Any]:
    return {
        "file_id": source.file_id,
        "filename": source.name,
        "score": source.score,
        "attributes": source.attributes,
        "content": [{"type": "text", "text": source.text}],
        **source.span,
    }


def _counts(counts: FileCounts) -> dict[str, int]:
    names = ("in_progress", "completed", "failed", "cancelled", "total")
    return {name: getattr(counts, name) for name in names}
