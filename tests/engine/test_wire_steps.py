"""Outputs between the engine's process and a reader: merged, read in parts, complete and in order."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

from weft.config import ServingEngineConfig
from weft.engine.ipc import wire
from weft.engine.ipc.client import EngineClient
from weft.engine.ipc.outbox import Outbox, _merged
from weft.engine.ipc.process import EngineProcess
from weft.engine.serving import Callback
from weft.request import (
    FinishReason,
    GenerationResult,
    InferenceRequest,
    RequestId,
    RequestState,
    SamplingParams,
    TokenOutput,
)
from weft.server.stream.choices import Choices
from weft.text.tokenizer import Tokenizer


def final(request_id: int) -> TokenOutput:
    return TokenOutput(RequestId(str(request_id)), 9, "", None, True, FinishReason.LENGTH, 5)


def test_adjacent_step_reports_are_merged_and_other_messages_keep_their_place() -> None:
    first = wire.StepReport((1, 2), (10, 20), (), ())
    last = wire.Output.of(final(2), 2)
    second = wire.StepReport((1,), (11,), (last,), ())
    refused = wire.Refused((3,), "WeftError", "no")
    third = wire.StepReport((1,), (12,), (), ())
    together, kept, after = _merged([first, second, refused, third])
    assert together == wire.StepReport((1, 2, 1), (10, 20, 11), (last,), ())
    assert kept is refused and after is third


def test_a_large_step_report_is_not_merged() -> None:
    large = wire.StepReport(tuple(range(300)), tuple(range(300)), (), ())
    assert _merged([large, large]) == [large, large]


def test_messages_that_the_socket_does_not_accept_are_sent_later_complete_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox = Outbox(ours)
        for number in range(20_000):  # much more than the socket buffers
            outbox.send(wire.StepReport((1,), (number,), (), ()))
        frames, tokens = wire.Frames(), []
        theirs.settimeout(60.0)
        while len(tokens) < 20_000:
            for content in frames.feed(theirs.recv(1 << 16)):
                step = wire.from_engine.decode(content)
                assert isinstance(step, wire.StepReport)
                tokens += step.tokens
        assert tokens == list(range(20_000))
        outbox.send(wire.StepReport((1,), (20_000,), (), ()))
        outbox.close(10.0)
        assert [*frames.feed(theirs.recv(1 << 16))] == [
            wire.framed(wire.StepReport((1,), (20_000,), (), ()))[4:]
        ]


def test_sending_to_a_closed_connection_does_nothing() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.close()
        outbox = Outbox(ours)
        outbox.send(wire.StepReport((1,), (1,), (), ()))
        outbox.send(wire.StepReport((1,), (2,), (), ()))
        outbox.close(10.0)


class QuickEngine:
    """Delivers the first token and the end before `submit_choices` returns."""

    def submit_choices(
        self, request: InferenceRequest, take: Callback, indices: range
    ) -> tuple[RequestId, ...]:
        take(TokenOutput(request.request_id, 5, "", None, False, None, 4))
        take(final(7))
        return (request.request_id,)

    def get_result(self, request_id: RequestId) -> GenerationResult:
        return GenerationResult(
            request_id, (5, 9), "", RequestState.COMPLETED, FinishReason.LENGTH, None, 0, 0, 0, 0, 0,
            prompt_token_count=3, cached_token_count=0, preemptions=0,
        )  # fmt: skip


def test_a_token_that_arrives_before_the_request_is_submitted_is_reported_by_its_handle() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = EngineProcess(theirs)
        process._engine = QuickEngine()  # type: ignore[assignment]
        process._handle(wire.Submit.of((3,), InferenceRequest((1, 2, 3), request_id=RequestId("7"))))
        assert (process._token_handles, process._tokens) == ([3], [5])
        assert [output.handle for output in process._outputs] == [3]
        assert [(result.request_id, result.num_tokens) for result in process._ended] == [("7", 2)]
        assert not process._handles, "handles of ended answers are removed"
        process._outbox.close(10.0)


def noop_client() -> EngineClient:
    return EngineClient("noop", {"vocabulary_size": 1000}, ServingEngineConfig())


def test_an_answer_can_be_read_in_parts_with_correct_sequence_lengths() -> None:
    async def run() -> None:
        client = noop_client()
        await client.start()
        request = InferenceRequest((1, 2, 3), SamplingParams(max_tokens=40, seed=1))
        (answer,) = await client.submit(request)
        while answer.result is None:
            await asyncio.sleep(0.01)
        outputs = []
        while not outputs or not outputs[-1].is_final:
            answer.arrived.clear()
            part = answer.take(7)
            assert 1 <= len(part) <= 7
            outputs += part
            assert answer.arrived.is_set() != outputs[-1].is_final, (
                "`arrived` must be set while outputs are unread"
            )
        assert len(outputs) == answer.num_tokens == answer.result.completion_token_count
        assert [output.sequence_length for output in outputs] == list(range(4, 44))
        await client.stop()

    asyncio.run(run())


def test_many_answers_are_read_completely_in_bounded_pieces(
    default_tokenizer: Tokenizer, default_model_path: Path
) -> None:
    async def run() -> None:
        client = noop_client()
        await client.start()
        choices = Choices(client, default_tokenizer)
        params = SamplingParams(max_tokens=30, seed=1, n=100, logprobs=3)
        await choices.submit([InferenceRequest((1, 2, 3), params)])
        while client.num_unfinished:
            await asyncio.sleep(0.01)
        largest, num_reads = 0, 0
        while not choices.is_over:
            await asyncio.wait_for(choices.wait(), 60)
            largest = max(largest, sum(len(piece.tokens) for piece in choices.take()))
            num_reads += 1
        assert largest <= 200 and num_reads >= 15, (largest, num_reads)
        assert [result.completion_token_count for result in choices.results] == [30] * 100
        await client.stop()

    asyncio.run(run())
