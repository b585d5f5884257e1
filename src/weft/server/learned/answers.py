"""Keeps answers, so that clients can send feedback about them: a bounded queue, written in batches.

An answer is queued before its last bytes are sent, and never waits for the store. `flush` writes the queue at once: a
client may send feedback as soon as it has the answer.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.server.learned.transcript import KeptInput, Memory, Transcript
from weft.server.state import feedback as table
from weft.server.state.feedback import KeptAnswers, Room, Totals
from weft.server.state.store import Store, StoreError
from weft.text.conversation import Conversation
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from weft.request import InferenceRequest, RequestId
    from weft.server.admission.keys import ApiKey
    from weft.server.api.answer_format import ParsedRequest
    from weft.server.settings import ServerSettings

_MAX_BYTES = 64 << 20
"""Limit for the answers in memory: those that are being generated, and those in the queue."""
_MAX_QUEUED = 1024
_BATCH_SECONDS = 0.5
"""An answer waits up to this long, so that a transaction has several."""
_AT_ONCE = 64
"""Maximum answers of one transaction, so that other work of the store does not wait long."""


class AnswerKeeper:
    """Owns the queue. Belongs to one event loop."""

    def __init__(
        self, settings: ServerSettings, store: Store, tokenizer: Tokenizer, log: Callable[..., object]
    ) -> None:
        self._store = store
        self._tokenizer = tokenizer
        self._log = log
        self.is_on = settings.feedback_days > 0
        self.room = Room(settings.feedback_days, settings.max_feedback_bytes, settings.max_stored_bytes)
        self.memory = Memory(_MAX_BYTES)
        self.totals = Totals()
        """The totals of all owners, after the last transaction of this server."""
        self.num_given = Counter[str]()
        """Feedback since the start, by the sign of its score."""
        self._queue: deque[Transcript] = deque()
        self._wake = asyncio.Event()
        self._writing = asyncio.Lock()
        self._has_failed = False

    def shown(self) -> dict[str, int] | None:
        """The totals for the live view. None: no feedback is kept."""
        found = self.totals
        names = ("requests", "positive", "negative", "corrected")
        return {name: getattr(found, name) for name in names} if self.is_on else None

    def keeps_for(self, key: ApiKey | None) -> bool:
        """Whether answers for this key are kept: operator and key must both allow it."""
        return self.is_on and (key is None or key.feedback)

    def begin(
        self,
        key: ApiKey | None,
        owner: str,
        request_id: RequestId,
        parsed: ParsedRequest,
        requests: Sequence[InferenceRequest],
        model: str,
        size: int,
    ) -> Transcript | None:
        """A transcript that collects the answers to a request. None: they are not kept. `size`: bytes of its body."""
        if not self.keeps_for(key) or parsed.earlier_tokens:
            return None
        prompt = parsed.prompt if isinstance(parsed.prompt, Conversation) else tuple(parsed.prompt)
        tokens = () if isinstance(prompt, Conversation) else [one.prompt for one in requests]
        given = KeptInput(request_id, owner, model, prompt, tokens, parsed.tools.template_tools)
        return Transcript(given, size + parsed.stored_bytes, self.memory)

    def put(self, transcript: Transcript | None) -> None:
        """Queues the answers of a request that has ended well."""
        if transcript is None:
            return
        if len(self._queue) >= _MAX_QUEUED:
            if transcript.is_open:
                self.memory.num_lost += 1
            transcript.drop()
        elif transcript.close():
            self._queue.append(transcript)
            self._wake.set()

    async def run(self) -> None:
        """Writes the queue whenever it has answers, until it is cancelled."""
        if self.is_on and self._store.exists:
            await self._count()
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(_BATCH_SECONDS)
            try:
                await asyncio.shield(self.flush())  # a cancel must not lose what was taken from the queue
            except Exception as error:  # later answers must not wait for a restart of the server
                self._log("mistake", f"{type(error).__name__} while answers were kept", "error")

    async def flush(self) -> None:
        """Writes all answers that are in the queue. If the store fails, they are lost, and the error is logged."""
        async with self._writing:
            while self._queue:
                taken = [self._queue.popleft() for _ in range(min(_AT_ONCE, len(self._queue)))]
                try:
                    rows = await asyncio.to_thread(self._rows, taken, self._store.wall_clock())
                    added = await self._store.run(partial(self._insert, rows))
                    self.memory.num_lost += len(rows) - added
                    self._has_failed = False
                except StoreError as error:
                    self.memory.num_lost += len(taken)
                    if not self._has_failed:  # one line for each outage
                        self._log(
                            "answers_not_kept", f"Answers are not kept for feedback: {error}", "warning"
                        )
                    self._has_failed = True
                finally:
                    for one in taken:
                        one.free()

    def _rows(self, transcripts: Sequence[Transcript], now: float) -> list[KeptAnswers]:
        return [one.as_row(self._tokenizer, now) for one in transcripts]

    def _insert(self, rows: Sequence[KeptAnswers], connection: Any) -> int:
        added = table.insert(connection, rows, self.room)
        self.count(connection)
        return added

    def count(self, connection: Any) -> None:
        """Updates `totals`. Call after a change of the tables, in the same transaction."""
        self.totals = table.totals(connection)

    async def _count(self) -> None:
        """Reads the totals at the start of the server."""
        try:
            await self._store.run(self.count)
        except StoreError as error:
            self._log("answers_not_kept", f"Feedback cannot be read: {error}", "warning")
