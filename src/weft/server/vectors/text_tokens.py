"""Tokenises the texts of one model that makes vectors or scores, without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from weft.errors import PromptTooLongError
from weft.server.errors import ApiError, refusal
from weft.server.text_work.work_slots import WorkSlots
from weft.server.text_work.worker import Workers
from weft.server.vectors.vector_text_process import (
    JobKind,
    VectorTextJob,
    VectorTextRefusal,
    VectorTextResult,
    convert,
)
from weft.text.embedding_text import EmbeddingText, PairPart

MAX_TOKENS = 1 << 20
"""Limit for the tokens of all inputs of one request together."""
_TINY_BYTES = 1 << 10
"""Texts of up to this size together are tokenised in less time than waking a thread takes."""
_SHORT_BYTES = 8 << 10
"""Texts of up to this size are tokenised in a thread, and longer ones in a worker process: the tokenizer holds the
interpreter lock."""
_GROUP_BYTES = 64 << 10
_BYTES_PER_TEXT = 32
"""Fixed cost of a text, as a number of bytes to tokenise."""
_SECONDS_PER_BYTE = 5e-7
_THREADS = 2
_PROCESSES = 2
_SECONDS = 120.0


class VectorTexts:
    """Owns the threads for short texts and the worker processes for long ones, which start when they are needed."""

    def __init__(self, text: EmbeddingText, path: str) -> None:
        self._text = text
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weft-vectors")
        self._slots = WorkSlots(_THREADS)
        self._workers = Workers("weft.server.vectors.vector_text_process", path, count=_PROCESSES)
        self._decoder = msgspec.msgpack.Decoder(VectorTextResult)

    async def encode(
        self,
        kind: JobKind,
        texts: Sequence[str],
        client_id: str,
        *,
        field: str = "input",
        truncate: bool = False,
        allows_empty: bool = False,
    ) -> list[list[int]]:
        """The tokens of each text. Errors name `field` and the index of the text. A text without tokens is an error unless
        `allows_empty`."""
        tokens: list[list[int]] = []
        num_tokens = 0
        async for part in self._parts(
            kind, texts, client_id, field, truncate=truncate, allows_empty=allows_empty
        ):
            num_tokens += part.num_tokens
            check_num_tokens(num_tokens, field)
            tokens.append(part.tokens)
        return tokens

    async def encode_pairs(
        self,
        queries: Sequence[str],
        texts: Sequence[str],
        client_id: str,
        *,
        query_field: str = "query",
        field: str = "documents",
        max_document: int | None = None,
    ) -> list[list[int]]:
        """The tokens of the pair of each text and its query: the only query, or the one at the same index. Long texts are
        cut. The only query is tokenised once. `max_document`: at most this many tokens of each text are used."""
        asked = [part async for part in self._parts("pair_query", queries, client_id, query_field)]
        if len(asked) == 1:
            asked *= len(texts)
        tokens: list[list[int]] = []
        num_tokens = 0
        async for part in self._parts("pair_document", texts, client_id, field, max_document=max_document):
            query = asked[len(tokens)]
            # Checked before the pair is made: a short body may have many times its size in tokens of pairs.
            num_tokens += self._text.num_pair_tokens(query, part)
            check_num_tokens(num_tokens, field)
            tokens.append(self._text.pair(query, part, truncate=True))
        return tokens

    async def _parts(
        self,
        kind: JobKind,
        texts: Sequence[str],
        client_id: str,
        field: str,
        *,
        truncate: bool = False,
        max_document: int | None = None,
        allows_empty: bool = False,
    ) -> AsyncIterator[PairPart]:
        """The tokens of each text. `PairPart` also holds texts that belong to no pair. Tokenises group by group."""
        for start, end, size in _groups(texts):
            job = VectorTextJob(kind, list(texts[start:end]), truncate, start, max_document, allows_empty)
            result = await self._convert(job, size, client_id)
            if isinstance(result, VectorTextRefusal):
                raise _error(result, field if len(texts) == 1 else f"{field}[{result.index}]")
            for part in result.parts:
                yield part

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._workers.close()

    async def _convert(self, job: VectorTextJob, size: int, client_id: str) -> VectorTextResult:
        if size <= _TINY_BYTES:
            return convert(self._text, job)
        cost = _SECONDS_PER_BYTE * size
        if size <= _SHORT_BYTES:
            await self._slots.take(client_id, cost)
            try:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(self._threads, convert, self._text, job)
            finally:
                self._slots.free(cost)
        try:
            result = await self._workers.run(
                msgspec.msgpack.encode(job), client_id=client_id, cost=cost, seconds=_SECONDS
            )
        except TimeoutError:
            message = (
                f"tokenising took more than {_SECONDS:g} s; send the request again later, or shorter texts"
            )
            raise ApiError(503, message, code="server_busy") from None
        return self._decoder.decode(result)


def check_num_tokens(num_tokens: int, field: str) -> None:
    """Refuses a request with too many tokens."""
    if num_tokens > MAX_TOKENS:
        message = f"{field} has at least {num_tokens} tokens in all; allowed: at most {MAX_TOKENS}. Split it into several requests"
        raise refusal(message, field)


def _error(refused: VectorTextRefusal, where: str) -> Exception:
    message = f"{where}: {refused.message}"
    if refused.lengths is not None:
        return PromptTooLongError(message, where, *refused.lengths)
    return refusal(message, where, refused.code)


def _groups(texts: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """Splits texts into groups, so that other requests can run in between. Yields the start, the end and the size in
    bytes of each."""
    start = size = 0
    for index, text in enumerate(texts):
        more = len(text) + _BYTES_PER_TEXT
        if index > start and size + more > _GROUP_BYTES:
            yield start, index, size
            start, size = index, 0
        size += more
    if len(texts) > start:
        yield start, len(texts), size
