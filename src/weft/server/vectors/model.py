"""One model that makes vectors or scores: its names, its texts and its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from weft.embedding import EmbeddingSpec
from weft.engine.ipc.client import EngineClient, EngineState
from weft.engine.ipc.remote_answer import RemoteAnswer
from weft.errors import InvalidRequestError, PromptTooLongError, WeftError
from weft.request import InferenceRequest, RequestId, RequestState, SamplingParams
from weft.server.errors import ApiError, failed_result
from weft.server.vectors.gate import VectorGate
from weft.server.vectors.interface import ENGINE_NOT_READY, ENGINE_NOT_RESPONDING, TextKind
from weft.server.vectors.text_tokens import VectorTexts
from weft.vectors import Vectors, np

_ONE_TOKEN = SamplingParams(max_tokens=1)
"""The engine reports a vector with the one token that it samples. The token means nothing."""
_ROOM_TOKENS = 1536
"""Maximum tokens in an engine that reports no other number (`BackendInfo.room_tokens`): enough for the running step and
the next one. A text that arrives waits for them. With 1,536, all-MiniLM-L6-v2 needs 3% more CPU time for a text than with
3,072, and the wait is half as long."""
_ROOM_BESIDE_ANSWERS = 512
"""Maximum tokens while another engine generates answers on the same cores: each of its steps waits for a step of this
model."""
_GROUP_TOKENS = 256
_GROUP_INPUTS = 16
"""Inputs go to the engine in groups of at most this size. A larger group makes other requests wait longer."""


@dataclass(frozen=True)
class VectorCaller:
    """The request that needs vectors, and the client that sent it."""

    request_id: RequestId
    client_id: str = ""
    weight: float = 1.0
    is_idle_work: bool = False


class VectorModel:
    """Implements `interface.Embedder` and `interface.Reranker`. Belongs to one event loop."""

    def __init__(
        self, names: Sequence[str], path: str, spec: EmbeddingSpec, engine: EngineClient, texts: VectorTexts
    ) -> None:
        assert engine.info is not None, "the engine must be started before the server"
        self.names = tuple(names)
        self.path = path
        self.spec = spec
        self.engine = engine
        self.texts = texts
        self.vocabulary_size = engine.info.vocabulary_size
        self._room_tokens = engine.info.room_tokens or _ROOM_TOKENS
        self.beside: EngineClient | None = None
        """An engine on the same cores that generates text. Each of its steps waits for the end of a step of this model. So
        while it has answers to generate, the steps of this model are short."""
        self.gate = VectorGate(self._max_tokens)

    @property
    def name(self) -> str:
        return self.names[0]

    def _max_tokens(self) -> int:
        """How many tokens may be in the engine."""
        has_answers = self.beside is not None and self.beside.num_unfinished > 0
        return _ROOM_BESIDE_ANSWERS if has_answers else self._room_tokens

    def check_ready(self) -> None:
        """Raises a 503 while the engine of the model is not ready or does not respond."""
        if self.engine.is_responding:
            return
        is_ready = self.engine.state is EngineState.READY
        raise ApiError(
            503,
            f"the engine of {self.name!r} {'does not respond' if is_ready else 'is starting'}; try again",
            code=ENGINE_NOT_RESPONDING if is_ready else ENGINE_NOT_READY,
            retry_after=self.engine.seconds_until_ready,
        )

    def check_tokens(self, tokens: Sequence[int], where: str) -> None:
        """Refuses tokens that a client sent and that the model cannot read."""
        if not tokens:
            raise InvalidRequestError(f"{where} is empty; send at least 1 token", field=where)
        if len(tokens) > self.spec.max_tokens:
            raise PromptTooLongError(
                f"{where} has {len(tokens)} tokens; the model {self.name!r} reads at most {self.spec.max_tokens}; "
                "shorten it",
                where,
                len(tokens),
                self.spec.max_tokens,
            )
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self.vocabulary_size:
                last = self.vocabulary_size - 1
                raise InvalidRequestError(f"{where} has the token {token}; allowed: 0 to {last}", field=where)

    # ------------------------------------------------------------------ for the rest of the server

    def new_id(self) -> RequestId:
        return self.engine.new_id()

    async def embed(
        self,
        texts: Sequence[str],
        kind: TextKind,
        *,
        request_id: RequestId,
        client_id: str = "",
        is_idle_work: bool = False,
    ) -> Vectors:
        prompts = await self.texts.encode(kind, texts, client_id)
        return await self.run(prompts, VectorCaller(request_id, client_id, is_idle_work=is_idle_work))

    async def rerank(
        self, query: str, documents: Sequence[str], *, request_id: RequestId, client_id: str = ""
    ) -> list[float]:
        prompts = await self.texts.encode_pairs([query], documents, client_id)
        scores = await self.run(prompts, VectorCaller(request_id, client_id))
        return [float(score) for score in scores[:, 0]]

    async def count_tokens(self, texts: Sequence[str], kind: TextKind) -> list[int]:
        return [len(tokens) for tokens in await self.texts.encode(kind, texts, "", allows_empty=True)]

    # ------------------------------------------------------------------ running

    async def run(self, prompts: Sequence[Sequence[int]], caller: VectorCaller) -> Vectors:
        """The vectors of prompts. The vectors of a reranker have one number. Raises if the engine fails or ends; then no
        input of the call is left in the engine."""
        self.check_ready()
        run = _Run(self, prompts, caller)
        try:
            return await run.finish()
        finally:
            run.close()

    async def close(self) -> None:
        await self.texts.close()


class _Run:
    """The inputs of one request: submits them group by group, and collects their vectors."""

    def __init__(self, model: VectorModel, prompts: Sequence[Sequence[int]], caller: VectorCaller) -> None:
        self._model = model
        self._gate = model.gate
        self._prompts = prompts
        self._caller = caller
        self._vectors = np.empty((len(prompts), model.spec.dimensions), np.float32)
        self._ticket = self._gate.enter(caller.client_id, caller.weight, is_idle_work=caller.is_idle_work)
        self._open: dict[int, RemoteAnswer] = {}
        """Index of an input that is in the engine -> its answer."""
        self._num_submitted = 0
        self._arrived = asyncio.Event()

    async def finish(self) -> Vectors:
        submitting = asyncio.create_task(self._submit_all())
        submitting.add_done_callback(lambda _: self._arrived.set())
        try:
            await self._collect_all(submitting)
        finally:
            submitting.cancel()
            await asyncio.wait((submitting,))  # it must not submit after `close`
        return self._vectors

    def close(self) -> None:
        for index, answer in self._open.items():
            answer.cancel("the client is gone")
            self._gate.free(len(self._prompts[index]))
        self._open.clear()
        self._gate.leave(self._ticket)

    async def _submit_all(self) -> None:
        """Submits the inputs group by group, each when the gate releases it."""
        while self._num_submitted < len(self._prompts):
            indices, num_tokens = self._next_group()
            await self._gate.take(self._ticket, num_tokens)
            for index in indices:
                prompt = self._prompts[index]
                try:
                    [answer] = await self._model.engine.submit(
                        InferenceRequest(
                            tuple(prompt),
                            _ONE_TOKEN,
                            request_id=self._id_of(index),
                        ),
                        self._arrived,
                    )
                except BaseException:
                    # Frees the inputs of the group that were not submitted. `close` frees the others.
                    self._gate.free(num_tokens)
                    raise
                num_tokens -= len(prompt)
                self._open[index] = answer
            self._num_submitted = indices.stop
            self._arrived.set()

    def _id_of(self, index: int) -> RequestId:
        """The id of one input. It has the form of the ids of several prompts or answers (docs/internals/server.md)."""
        request_id = self._caller.request_id
        return request_id if len(self._prompts) == 1 else RequestId(f"{request_id}-{index}")

    def _next_group(self) -> tuple[range, int]:
        first = end = self._num_submitted
        num_tokens = 0
        for prompt in self._prompts[first : first + _GROUP_INPUTS]:
            if end > first and num_tokens + len(prompt) > _GROUP_TOKENS:
                break
            num_tokens += len(prompt)
            end += 1
        return range(first, end), num_tokens

    async def _collect_all(self, submitting: asyncio.Task[None]) -> None:
        num_left = len(self._prompts)
        while num_left:
            await self._arrived.wait()
            self._arrived.clear()
            if submitting.done():
                submitting.result()  # raises if an input was refused
            for index, answer in list(self._open.items()):
                answer.check()
                if answer.result is not None:
                    self._take(index, answer)
                    num_left -= 1

    def _take(self, index: int, answer: RemoteAnswer) -> None:
        """Keeps the vector of an input that the engine has computed, and frees its place at the gate."""
        result = answer.result
        assert result is not None
        del self._open[index]
        self._gate.free(len(self._prompts[index]))
        if result.state is not RequestState.COMPLETED or result.vector is None:
            raise failed_result(result)
        vector = np.frombuffer(result.vector, "<f4")
        if not np.isfinite(vector).all():
            raise WeftError("the model computed a vector that is not finite; its weights may be damaged")
        self._vectors[index] = vector
