"""Grammars of requests, tried out in processes of their own before the engine sees them. Owns those processes."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

import msgspec

from weft.errors import InvalidRequestError, WeftError
from weft.request import Grammar
from weft.server.grammar_process import Accepted, Verdict
from weft.server.worker import Worker

_PROCESSES = 2
"""So that one slow grammar does not hold up everybody else's."""
_START_SECONDS = 60.0
_COMPILE_SECONDS = 5.0
"""An ordinary grammar takes a few milliseconds, the largest that is accepted about half a second."""
_MAX_VERDICTS = 256
_FIRST = Grammar("regex", "a")


class GrammarChecker:
    """Belongs to one event loop. Processes are started when the first grammar comes."""

    def __init__(self, path: str, vocabulary_size: int, compile_seconds: float = _COMPILE_SECONDS) -> None:
        self._idle = [_Compiler(path, vocabulary_size, compile_seconds) for _ in range(_PROCESSES)]
        self._compilers = tuple(self._idle)
        self._free = asyncio.Semaphore(_PROCESSES)
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._under_way: dict[bytes, asyncio.Task[Verdict]] = {}

    async def check(self, grammar: Grammar) -> Grammar:
        """The grammar as the engine takes it. Raises InvalidRequestError for one that cannot be used."""
        key = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            # Several may ask for the same at once; and one that goes away must not take the others' answer along.
            task = self._under_way.get(key)
            if task is None:
                task = self._under_way[key] = asyncio.create_task(self._try_out(key, grammar))
            verdict = await asyncio.shield(task)
        else:
            self._verdicts.move_to_end(key)
        if not isinstance(verdict, Accepted):
            raise InvalidRequestError(verdict.message, field=verdict.field, code=verdict.code)
        return grammar if verdict.definition is None else Grammar(grammar.kind, verdict.definition)

    async def close(self) -> None:
        under_way = list(self._under_way.values())
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        for compiler in self._compilers:
            await compiler.close()

    async def _try_out(self, key: bytes, grammar: Grammar) -> Verdict:
        try:
            async with self._free:
                compiler = self._idle.pop()  # the one used last: a second is started only where two are busy
                try:
                    verdict = await compiler.ask(grammar)
                finally:
                    self._idle.append(compiler)
        finally:
            del self._under_way[key]
        self._verdicts[key] = verdict
        while len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict


class _Compiler:
    """One process, started when there is something to do."""

    def __init__(self, path: str, vocabulary_size: int, compile_seconds: float) -> None:
        self._worker = Worker("weft.server.grammar_process", path, str(vocabulary_size))
        self._compile_seconds = compile_seconds
        self._verdicts = msgspec.msgpack.Decoder(Verdict)

    async def ask(self, grammar: Grammar) -> Verdict:
        if not self._worker.is_running:
            await self._start()
        try:
            question = msgspec.msgpack.encode(grammar)
            return self._verdicts.decode(await self._worker.ask(question, seconds=self._compile_seconds))
        except TimeoutError:
            raise _too_complex(f"it takes more than {self._compile_seconds:g} s to compile") from None
        except WeftError:
            raise _too_complex("it takes more memory than there is for it") from None

    async def close(self) -> None:
        await self._worker.close()

    async def _start(self) -> None:
        """The first question makes it read the vocabulary, which no grammar's deadline should count."""
        try:
            await self._worker.ask(msgspec.msgpack.encode(_FIRST), seconds=_START_SECONDS)
        except (TimeoutError, WeftError) as error:
            raise WeftError("the process that compiles grammars does not start; try again") from error


def _too_complex(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the grammar cannot be used: {why}; make it simpler", field="grammar", code="grammar_too_complex"
    )
