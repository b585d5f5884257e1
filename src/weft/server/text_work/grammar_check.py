"""Checks grammars of requests in worker processes before they go to the engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

import msgspec

from weft.errors import InvalidRequestError
from weft.request import Grammar
from weft.server.text_work.grammar_process import Accepted, Outcome, Trial, Unfinished, Verdict
from weft.server.text_work.text_process import Refusal
from weft.server.text_work.work_slots import CHEAP_SECONDS
from weft.server.text_work.worker import Workers

_PROCESSES = 2
_COMPILE_SECONDS = 5.0
"""Limit in CPU seconds. An ordinary grammar takes a few milliseconds, the largest accepted one about half a second."""
_FIRST_SECONDS = (CHEAP_SECONDS, 1.0)
"""Limits in CPU seconds for the first trials of a grammar. Its cost is unknown, and low limits delay other grammars
little. A grammar that exceeds a limit is compiled again as costly work, which never occupies all processes."""
_STUCK_SECONDS = 20.0
"""A worker process without a result for this long is stuck."""
_MAX_VERDICTS = 256


class GrammarChecker:
    """Owns the worker processes for grammars, which start with the first grammar. Belongs to one event loop."""

    def __init__(
        self,
        path: str,
        vocabulary_size: int,
        compile_seconds: float = _COMPILE_SECONDS,
        stuck_seconds: float = _STUCK_SECONDS,
    ) -> None:
        self._workers = Workers(
            "weft.server.text_work.grammar_process", path, str(vocabulary_size), count=_PROCESSES
        )
        self._outcomes = msgspec.msgpack.Decoder(Outcome)
        self._compile_seconds = compile_seconds
        self._stuck_seconds = stuck_seconds
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._trials: dict[bytes, _SharedTrial] = {}

    async def check(self, grammar: Grammar, client_id: str = "") -> Grammar:
        """The grammar in the form that the engine accepts. Raises InvalidRequestError if it cannot be used."""
        key = hashlib.sha256(msgspec.msgpack.encode(grammar)).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._shared_verdict(key, grammar, client_id)
        else:
            self._verdicts.move_to_end(key)
        if not isinstance(verdict, Accepted):
            raise InvalidRequestError(verdict.message, field=verdict.field, code=verdict.code)
        return grammar if verdict.definition is None else Grammar(grammar.kind, verdict.definition)

    async def close(self) -> None:
        tasks = [trial.task for trial in self._trials.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._workers.close()

    async def _shared_verdict(self, key: bytes, grammar: Grammar, client_id: str) -> Verdict:
        """Compiles a grammar once for all requests that wait for it. Cancels the trial when no request waits for it."""
        trial = self._trials.get(key)
        if trial is None:
            trial = _SharedTrial(asyncio.create_task(self._compile(key, grammar, client_id)))
            self._trials[key] = trial
        trial.num_waiting += 1
        try:
            return await asyncio.shield(trial.task)
        finally:
            trial.num_waiting -= 1
            if not trial.num_waiting:
                trial.task.cancel()
                del self._trials[key]

    async def _compile(self, key: bytes, grammar: Grammar, client_id: str) -> Verdict:
        """Compiles the grammar with one limit after the other. Keeps the verdict unless the cause may not be the grammar."""
        first = (seconds for seconds in _FIRST_SECONDS if seconds < self._compile_seconds)
        is_slow = False
        for seconds in (*first, self._compile_seconds):
            try:
                outcome = await self._run_trial(Trial(grammar, seconds), client_id)
            except TimeoutError:  # the process was stuck, which may have causes other than the grammar
                is_slow = True
                continue
            if not isinstance(outcome, Unfinished):
                return self._cached(key, outcome)
            if not outcome.is_out_of_time:
                return _too_complex("compiling it needs too much memory")
        refusal = _too_complex(f"compiling it takes more than {self._compile_seconds:g} s")
        return refusal if is_slow else self._cached(key, refusal)

    async def _run_trial(self, trial: Trial, client_id: str) -> Outcome:
        result = await self._workers.run(
            msgspec.msgpack.encode(trial),
            client_id=client_id,
            cost=trial.seconds,
            seconds=self._stuck_seconds,
        )
        return self._outcomes.decode(result)

    def _cached(self, key: bytes, verdict: Verdict) -> Verdict:
        self._verdicts[key] = verdict
        while len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict


class _SharedTrial:
    """A grammar that is being compiled, and the number of requests that wait for the verdict."""

    def __init__(self, task: asyncio.Task[Verdict]) -> None:
        self.task = task
        self.num_waiting = 0


def _too_complex(why: str) -> Refusal:
    return Refusal(f"the grammar cannot be used: {why}; make it simpler", "grammar", "grammar_too_complex")
