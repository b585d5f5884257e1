"""The times of a request that joined the sequence of an identical one, with pauses of the sequence."""

from __future__ import annotations

import pytest

from scripted_engine import ScriptedEngine, with_scripted_engine
from weft.request import (
    FinishReason,
    GenerationResult,
    InferenceRequest,
    PreemptedTime,
    RequestState,
    SamplingParams,
)
from weft.server.metrics import ServerMetrics
from weft.server.traces import _phases_of_answer

REQUEST = InferenceRequest(tuple(range(49)), SamplingParams(max_tokens=8, temperature=0.0))

SWAPPED = ((1 + 2, 2, 4, 3.0), (PreemptedTime(5.0, 7.0, True),))
"""A sequence waits for 1 s, computes its prompt for 2 s and decodes for 4 s, with a pause from 5 to 7."""
RECOMPUTED = ((1 + 2, 3, 3, 3.0), (PreemptedTime(5.0, 7.0, False),))
"""The same, but 1 s of the last 2 s computes tokens again."""
PAUSED_IN_PREFILL = ((1 + 2, 2, 4, 5.0), (PreemptedTime(2.0, 4.0, True),))
NEVER_ADMITTED = ((9, 0, 0, None), ())


@pytest.mark.parametrize(
    ("sequence", "joined", "expected", "first"),
    [
        (SWAPPED, 0.5, (0.5 + 2, 2, 4), 2.5),
        (SWAPPED, 2.0, (2, 1, 4), 1.0),
        (SWAPPED, 4.0, (2, 0, 3), 0.0),
        (SWAPPED, 6.0, (1, 0, 2), 0.0),
        (SWAPPED, 8.0, (0, 0, 1), 0.0),
        (RECOMPUTED, 4.0, (2, 1, 2), 0.0),
        (RECOMPUTED, 8.5, (0, 0, 0.5), 0.0),
        (PAUSED_IN_PREFILL, 1.5, (2, 1.5, 4), 3.5),
        (PAUSED_IN_PREFILL, 3.0, (1, 1, 4), 2.0),
        (NEVER_ADMITTED, 4.0, (5, 0, 0), None),
    ],
)
def test_the_times_of_a_request_that_joined_a_preempted_sequence_add_up(
    monkeypatch: pytest.MonkeyPatch,
    sequence: tuple[tuple[float, float, float, float | None], tuple[PreemptedTime, ...]],
    joined: float,
    expected: tuple[float, ...],
    first: float | None,
) -> None:
    (waiting, prefill, decode, first_token), pauses = sequence
    length = 9.0

    async def test(engine: ScriptedEngine) -> None:
        [own] = await engine.client.submit(REQUEST)
        await engine.pass_time(joined)
        [late] = await engine.client.submit(REQUEST)
        await engine.pass_time(length - joined)
        engine.client._answers[own.handle].end(
            GenerationResult(
                own.request_id, (), "", RequestState.COMPLETED, FinishReason.STOP, None, waiting, prefill, decode,
                first_token, 3, 49, 0, len(pauses), preempted_times=pauses, num_tokens=4,
            )
        )  # fmt: skip
        result = late.result
        assert result is not None and result.time_to_first_token == first
        times = (result.waiting_time, result.prefill_time, result.decode_time)
        assert times == pytest.approx(expected) and result.total_time == pytest.approx(length - joined)

        spans = list(_phases_of_answer(result, 0.0, {}))
        edges = [edge for span in spans for edge in (span.began, span.ended)]
        assert edges == sorted(edges) and (edges[0], edges[-1]) == (0.0, pytest.approx(length - joined))
        for span in spans:
            inner = [edge for child in span.children for edge in (child.began, child.ended)]
            assert [span.began, *inner, span.ended] == sorted([span.began, *inner, span.ended])

        metrics = ServerMetrics("m")
        metrics.answered([result], 1, length - joined)
        for name, seconds in zip(("queue", "prefill", "decode"), expected, strict=True):
            shown = metrics._registry.get_sample_value(
                f"weft:request_{name}_time_seconds_sum", {"model_name": "m"}
            )
            assert shown == pytest.approx(seconds), name

    with_scripted_engine(monkeypatch, test)
