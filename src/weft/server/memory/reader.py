"""Splits a stored file into passages. A worker process reads and splits; the embedding model counts tokens."""

from __future__ import annotations

from pathlib import Path

import msgspec

from weft.errors import PromptTooLongError
from weft.memory.documents import ChunkSize, DocumentError, Passage
from weft.memory.splitting import refit
from weft.server.memory.reading_process import (
    SECONDS,
    Failed,
    Job,
    ReadJob,
    ReadResult,
    Result,
    SplitJob,
    SplitResult,
)
from weft.server.text_work.worker import Worker
from weft.server.vectors.interface import Embedder

_MAX_COUNTED = 50_000
"""Maximum distinct words of a file that are tokenised. Every other word counts as one token per byte: never too few."""
_COUNTED_AT_ONCE = 1000
_CHECKED_AT_ONCE = 256
_MAX_TRIES = 4
_WAIT_SECONDS = 4.0 * SECONDS
"""`SECONDS` limits the processor time of a job. On a loaded machine, the job takes longer than that."""
_results = msgspec.msgpack.Decoder(Result)


class DocumentReader:
    """Owns the worker process that reads documents. Belongs to one event loop."""

    def __init__(self) -> None:
        self._worker = Worker("weft.server.memory.reading_process")

    async def close(self) -> None:
        await self._worker.close()

    async def passages(self, path: Path, name: str, size: ChunkSize, embedder: Embedder) -> list[Passage]:
        """The passages of a file, none longer than the model reads. Raises DocumentError if the file cannot be read."""
        read = await self._run(ReadJob(str(path), name))
        assert isinstance(read, ReadResult)
        tokens = await self._tokens_of_words(read.words, embedder)
        limit = embedder.spec.max_tokens
        [around] = await embedder.count_tokens([""], "document")
        size = size.within(limit - around)
        for _ in range(_MAX_TRIES):
            split = await self._run(SplitJob(read.document, size, tokens))
            assert isinstance(split, SplitResult)
            longest = await _longest(split.passages, embedder)
            if longest <= limit:
                return split.passages
            size = refit(size, longest, limit)
        message = f"a passage has {longest} tokens; the embedding model reads {limit}; send plain text"
        raise DocumentError(message)

    async def _tokens_of_words(self, words: list[str], embedder: Embedder) -> dict[str, int]:
        """The number of tokens of each word, for at most `_MAX_COUNTED` words."""
        tokens: dict[str, int] = {}
        # The embedding model adds this many tokens to every text; a word does not have them.
        [around] = await embedder.count_tokens([""], "document")
        for start in range(0, min(len(words), _MAX_COUNTED), _COUNTED_AT_ONCE):
            part = words[start : start + _COUNTED_AT_ONCE]
            counts = await embedder.count_tokens(part, "document")
            tokens |= {word: max(0, count - around) for word, count in zip(part, counts, strict=True)}
        return tokens

    async def _run(self, job: Job) -> Result:
        try:
            content = await self._worker.run(msgspec.msgpack.encode(job), seconds=_WAIT_SECONDS)
        except TimeoutError:
            raise DocumentError(f"reading the file took more than {_WAIT_SECONDS:.0f} s; split it") from None
        result = _results.decode(content)
        if isinstance(result, Failed):
            raise DocumentError(result.message, result.code)
        return result


async def _longest(passages: list[Passage], embedder: Embedder) -> int:
    """The number of tokens of the longest passage. If the model refuses a passage as too long, the number of that one."""
    longest = 0
    for start in range(0, len(passages), _CHECKED_AT_ONCE):
        texts = [one.searched_text for one in passages[start : start + _CHECKED_AT_ONCE]]
        try:
            longest = max(longest, *await embedder.count_tokens(texts, "document"))
        except PromptTooLongError as error:
            return error.num_tokens
    return longest
