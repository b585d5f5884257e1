"""The load generator without a server: parsing of streams, arrivals, statistics, notes and the report."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.bench import serve_html, serve_machine, serve_report
from weft.bench.serve import parse_duration, parse_lengths, parse_rates
from weft.bench.serve_api import Dialect
from weft.bench.serve_client import Client
from weft.bench.serve_load import (
    WORKLOADS,
    Item,
    Lengths,
    Phase,
    Text,
    burst_times,
    make_items,
    poisson_times,
    read_trace,
    workloads,
)
from weft.bench.serve_machine import MachineUse, Process, Snapshot
from weft.bench.serve_measure import (
    Record,
    Summary,
    Targets,
    describe_sweep,
    distribution,
    record_of,
    summarise,
)
from weft.bench.serve_run import PhaseResult, Report, Work, plan
from weft.bench.serve_stream import Answer, EventReader, JunkError, ResponseReader
from weft.errors import InvalidRequestError

# ---------------------------------------------------------------------- HTTP and server-sent events


def cuts(data: bytes) -> list[list[bytes]]:
    """The data in one piece, byte by byte, and in two pieces for every split position."""
    return [
        [data],
        [data[i : i + 1] for i in range(len(data))],
        *([data[:i], data[i:]] for i in range(1, len(data))),
    ]


CHUNKED = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5\r\nhello\r\n7;name=value\r\n\r\nworld\r\n0\r\nTrailer: x\r\n\r\n"
)
BY_LENGTH = b"HTTP/1.1 404 Not Found\r\ncontent-length: 12\r\n\r\nhello\r\nworld"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + BY_LENGTH


@pytest.mark.parametrize(("response", "status"), [(CHUNKED, 200), (BY_LENGTH, 404), (CONTINUED, 404)])
def test_a_response_reads_the_same_wherever_it_is_cut(response: bytes, status: int) -> None:
    for pieces in cuts(response):
        reader = ResponseReader()
        assert b"".join(reader.feed(piece) for piece in pieces) == b"hello\r\nworld"
        assert reader.status == status
        assert reader.is_complete and reader.keeps_connection


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.1 200 OK\r\n\r\nhello") == b"hello"
    assert not reader.is_complete
    reader.end_of_stream()
    assert reader.is_complete and not reader.keeps_connection


def test_a_chunked_body_is_not_ended_by_the_end_of_the_connection() -> None:
    reader = ResponseReader()
    reader.feed(CHUNKED[:-2])
    reader.end_of_stream()
    assert not reader.is_complete


def test_a_connection_with_the_header_close_is_not_reused() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nConnection: Close\r\n\r\n")
    assert reader.is_complete and not reader.keeps_connection


@pytest.mark.parametrize(
    "junk",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -4\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nmore",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"x" * 100_000,
    ],
)
def test_invalid_http_is_junk(junk: bytes) -> None:
    with pytest.raises(JunkError):
        ResponseReader().feed(junk)


EVENTS = (
    b': comment\r\ndata: {"a": 1}\r\n\r\nevent: x\nid: 7\ndata:no space\n\ndata: two\ndata: lines\n\n\n'
    b"data: \xc3\xa9\n\ndata: [DONE]\n\ndata: cut off"
)


def test_events_read_the_same_wherever_they_are_cut() -> None:
    for pieces in cuts(EVENTS):
        reader = EventReader()
        events = [event for piece in pieces for event in reader.feed(piece)]
        assert events == [b'{"a": 1}', b"no space", b"two\nlines", "é".encode(), b"[DONE]"]


def test_a_line_without_end_is_junk_before_it_fills_the_memory() -> None:
    reader = EventReader()
    with pytest.raises(JunkError, match="no end"):
        for _ in range(100):
            reader.feed(b"x" * 65536)


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_random_bytes_are_junk_or_nothing_but_never_another_error(pieces: list[bytes]) -> None:
    for start in (b"", CHUNKED[:60], CHUNKED[:90]):
        reader, events, answer = ResponseReader(), EventReader(), Answer(0.0)
        try:
            for piece in [start, *pieces] if start else pieces:
                for event in events.feed(reader.feed(piece)):
                    answer.take(event, 1.0)
        except JunkError:
            pass


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "usage",
                    "error",
                    "text",
                    "delta",
                    "completion_tokens",
                    "finish_reason",
                    "message",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_an_event_of_any_json_is_accepted_or_junk(value: object) -> None:
    answer = Answer(0.0)
    try:
        answer.take(json.dumps(value).encode(), 1.0)
    except JunkError:
        pass
    assert answer.completion_tokens is None or answer.completion_tokens >= 0


def test_deeply_nested_json_is_junk() -> None:
    with pytest.raises(JunkError):
        Answer(0.0).take(b"[" * 200_000, 1.0)


# ---------------------------------------------------------------------- the chunks of an answer


def answered(*events: object) -> Answer:
    """Event number i arrives at second i."""
    answer = Answer(0.0)
    for number, event in enumerate(events, 1):
        payload = event if isinstance(event, bytes) else json.dumps(event).encode()
        answer.take(payload, float(number))
    return answer


def text_chunk(text: str, finish_reason: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def delta_chunk(finish_reason: str | None = None, **delta: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]}


def test_a_token_without_text_counts_and_a_last_chunk_without_tokens_does_not() -> None:
    answer = answered(text_chunk("a"), text_chunk(""), text_chunk("é"), text_chunk("", "length"), b"[DONE]")
    assert answer.chunk_times == [1.0, 2.0, 3.0]
    assert answer.finish_reason == "length"
    assert answer.is_done and answer.ended == 5.0


def test_the_first_chunk_of_a_chat_is_no_token_but_reasoning_and_tool_calls_are() -> None:
    answer = answered(
        delta_chunk(role="assistant", content=""),
        delta_chunk(reasoning_content="hm"),
        delta_chunk(content="a"),
        delta_chunk(tool_calls=[{"index": 0}]),
        delta_chunk(finish_reason="stop"),
    )
    assert answer.chunk_times == [2.0, 3.0, 4.0]


def test_the_token_counts_of_the_server_are_used() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 4}}
    answer = answered(text_chunk("several tokens"), {"choices": [], "usage": usage}, b"[DONE]")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 7, 4)
    record = record_of(answer, Item((1, 2, 3), 7), start=0.0, due=None)
    assert (record.prompt_tokens, record.output_tokens, record.has_usage) == (9, 7, True)


def test_without_usage_chunks_are_counted_and_the_prompt_length_is_the_one_that_was_sent() -> None:
    answer = answered(text_chunk("a"), text_chunk("b"), b"[DONE]")
    record = record_of(answer, Item((1, 2, 3), 7), start=0.0, due=None)
    assert (record.prompt_tokens, record.output_tokens, record.has_usage) == (3, 2, False)


def test_an_error_in_the_stream_ends_the_answer() -> None:
    answer = answered(text_chunk("a"), {"error": {"message": "out of memory"}}, text_chunk("b"), b"[DONE]")
    assert answer.failure is not None
    assert (answer.failure.kind, answer.failure.detail) == ("error event", "out of memory")
    assert answer.chunk_times == [1.0] and not answer.is_done and answer.ended == 2.0


# ---------------------------------------------------------------------- measures


def record(
    began: float = 0.0,
    *chunk_times: float,
    ended: float | None = None,
    tokens: int | None = None,
    **fields: object,
) -> Record:
    times = chunk_times or (began + 1.0,)
    base = Record(
        due=None,
        began=began,
        chunk_times=times,
        ended=times[-1] if ended is None else ended,
        asked_tokens=len(times) if tokens is None else tokens,
        output_tokens=len(times) if tokens is None else tokens,
        prompt_tokens=10,
        cached_tokens=0,
        has_usage=True,
        finish_reason="length",
        failure_kind=None,
        failure_detail=None,
    )
    return dataclasses.replace(base, **fields)  # type: ignore[arg-type]


def failed(began: float = 0.0, ended: float = 1.0, kind: str = "refused") -> Record:
    return record(began, ended=ended, failure_kind=kind, failure_detail="why", chunk_times=())


def test_latencies_of_a_request_count_from_when_it_began() -> None:
    one = record(10.0, 10.5, 10.75, 11.75, ended=12.0)
    assert one.first_token == 0.5
    assert one.gaps == [0.25, 1.0]
    assert one.end_to_end == 2.0
    assert one.per_token == 0.625


def test_time_per_token_does_not_depend_on_how_tokens_are_bundled() -> None:
    single = record(0.0, *(1.0 + 0.1 * n for n in range(11)), tokens=11)
    bundled = record(0.0, 1.0, 1.5, 2.0, tokens=11)
    assert single.per_token == pytest.approx(bundled.per_token)
    assert max(single.gaps) < max(bundled.gaps)


def test_an_answer_of_one_chunk_has_no_gaps_and_no_time_per_token() -> None:
    one = record(0.0, 1.0, tokens=5)
    assert one.gaps == [] and one.per_token is None


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    random.Random(0).shuffle(values)
    found = distribution(values)
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max, found.mean, found.count) == (
        50,
        90,
        99,
        100,
        50.5,
        100,
    )
    assert distribution([]) is None
    assert distribution([3.0]) == dataclasses.replace(found, count=1, mean=3, p50=3, p90=3, p99=3, max=3)


def test_throughput_is_the_answered_work_over_the_whole_time() -> None:
    records = [
        record(1.0, 2.0, 3.0, tokens=20),
        record(2.0, 4.0, 6.0, tokens=30),
        failed(5.0, 11.0, "HTTP 503"),
        failed(5.0, 6.0, "HTTP 503"),
        failed(5.0, 6.0, "refused"),
    ]
    summary = summarise(records, Targets())
    assert summary.seconds == 10.0
    assert (summary.requests, summary.answered) == (5, 2)
    assert summary.output_tokens_per_second == 5.0
    assert summary.prompt_tokens_per_second == 2.0
    assert summary.requests_per_second == 0.2
    assert summary.failures == {"HTTP 503": 2, "refused": 1}
    assert summary.tokens_per_chunk == 12.5
    assert summary.first_token is not None and summary.first_token.count == 2
    assert summary.good_share is None and summary.goodput is None


def test_short_answers_are_counted() -> None:
    summary = summarise([record(0.0, 1.0, asked_tokens=8), record(0.0, 1.0)], Targets())
    assert summary.short_answers == 1


def test_goodput_counts_the_requests_that_meet_every_target() -> None:
    slow_start = record(0.0, 2.0, 2.1)
    slow_gap = record(0.0, 0.1, 1.2)
    slow_end = record(0.0, 0.1, 0.2, ended=10.0)
    good = record(0.0, 0.1, 0.2)
    records = [slow_start, slow_gap, slow_end, good, failed()]

    def good_ones(**targets: float) -> float | None:
        return summarise(records, Targets(**targets)).good_share

    assert good_ones(first_token=1.0) == 3 / 5
    assert good_ones(gap=1.0) == 3 / 5
    assert good_ones(end_to_end=5.0) == 3 / 5
    assert good_ones(first_token=1.0, gap=1.0, end_to_end=5.0) == 1 / 5
    assert summarise(records, Targets(1.0, 1.0, 5.0)).goodput == 1 / 10.0
    assert Targets(first_token=0.1, end_to_end=0.2).are_met(good), "a value equal to the target meets it"


def test_one_slow_gap_in_a_hundred_is_allowed_and_two_are_not() -> None:
    def with_slow_gaps(count: int) -> Record:
        gaps = [9.0] * count + [1.0] * (100 - count)
        return record(0.0, *(sum(gaps[:n]) for n in range(101)))

    targets = Targets(gap=1.0)
    assert targets.are_met(with_slow_gaps(1))
    assert not targets.are_met(with_slow_gaps(2))


def test_an_empty_or_wholly_failed_run_has_no_latencies_and_no_division_by_zero() -> None:
    for records in ([], [failed(1.0, 1.0)]):
        summary = summarise(records, Targets(first_token=1.0))
        assert summary.end_to_end is None and summary.output_tokens_per_second == 0.0


def sweep_point(rate: float, latency: float, good_share: float | None = None) -> tuple[float, Summary]:
    summary = summarise([record(0.0, latency)], Targets())
    return rate, dataclasses.replace(summary, good_share=good_share)


def test_a_sweep_reports_between_which_rates_latency_bends() -> None:
    points = [
        sweep_point(8, 9.0, 0.1),
        sweep_point(1, 1.0, 1.0),
        sweep_point(2, 1.5, 0.95),
        sweep_point(4, 2.5, 0.5),
    ]
    bend, kept = describe_sweep(points)
    assert "between 2 and 4 requests/s" in bend and "2.500 s, 2.5 times that at 1" in bend
    assert "up to 2 requests/s" in kept
    flat = describe_sweep([sweep_point(1, 1.0), sweep_point(2, 1.1)])
    assert flat == [
        "Latency does not bend up to 2 requests/s: the median end to end is 1.100 s, 1.1 times that at 1."
    ]
    assert describe_sweep([sweep_point(1, 1.0)]) == []


# ---------------------------------------------------------------------- arrivals and workloads


def test_poisson_arrivals_are_fixed_by_their_seed_and_have_the_rate_they_are_given() -> None:
    times = poisson_times(20_000, 4.0, seed=7)
    assert times == poisson_times(20_000, 4.0, seed=7) != poisson_times(20_000, 4.0, seed=8)
    assert times[0] == 0.0 and times == sorted(times)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(0.25, rel=0.02)
    assert deviation == pytest.approx(mean, rel=0.03), "the gaps of a Poisson process have this property"


def test_the_requests_of_a_burst_arrive_together_and_bursts_are_repeated() -> None:
    assert burst_times(5, size=2, every=0.5) == [0.0, 0.0, 0.5, 0.5, 1.0]


def numbered_text(run: int = 0) -> Text:
    """One token per character, numbered from 0, so that a slice shows its position."""
    return Text(lambda whole: range(len(whole)), run)


def test_items_have_consecutive_text_and_lengths_in_their_range() -> None:
    items = make_items(numbered_text(), [0.0] * 200, Lengths(3, 9), Lengths(5, 5), seed=1)
    assert [token for item in items for token in item.prompt] == list(
        range(sum(len(i.prompt) for i in items))
    )
    assert {len(item.prompt) for item in items} == set(range(3, 10))
    assert {item.max_tokens for item in items} == {5}


def by_name(names: tuple[str, ...] = WORKLOADS, run: int = 0) -> dict[str, Phase]:
    return {phase.name: phase for phase in workloads(names, numbered_text(run))}


def test_the_workloads_are_the_published_ones() -> None:
    phases = by_name()
    shapes = {
        name: (len(p.items), {len(i.prompt) for i in p.items}, {i.max_tokens for i in p.items}, p.clients)
        for name, p in phases.items()
        if name != "Wmix"
    }
    assert shapes == {
        "W1": (3, {128}, {128}, 1),
        "W8": (8, {128}, {128}, None),
        "W32": (32, {128}, {128}, None),
        "Wshare": (32, {544}, {64}, None),
        "Wshare-warm": (32, {544}, {64}, None),
    }
    assert all(item.at == 0.0 for name, p in phases.items() if name != "Wmix" for item in p.items)
    mix = phases["Wmix"].items
    assert [(len(item.prompt), item.max_tokens) for item in mix[:3]] == [(510, 215), (19, 39), (496, 222)]
    assert (sum(len(item.prompt) for item in mix), sum(item.max_tokens for item in mix)) == (16178, 9560)
    assert (mix[0].at, round(mix[1].at, 6), round(mix[-1].at, 6)) == (0.0, 0.03632, 3.428983)
    share = phases["Wshare"].items + phases["Wshare-warm"].items
    assert len({item.prompt[:512] for item in share}) == 1
    assert len({item.prompt for item in share}) == 64


def test_the_prompts_of_a_workload_do_not_depend_on_the_other_workloads() -> None:
    alone, all_of_them = by_name(("Wmix",)), by_name()
    assert alone["Wmix"] == all_of_them["Wmix"]


def test_another_run_uses_other_text() -> None:
    first, second = by_name(run=0), by_name(run=1)
    assert second["W1"].items[0].prompt[0] == 40_000
    seen = {item.prompt for phase in first.values() for item in phase.items}
    assert not seen & {item.prompt for phase in second.values() for item in phase.items}


def test_wshare_warm_is_warmed_by_wshare_or_by_a_warm_up_request() -> None:
    assert by_name()["Wshare-warm"].warm_up == ()
    (warm,) = by_name(("Wshare-warm",))["Wshare-warm"].warm_up
    item = by_name()["Wshare-warm"].items[0]
    assert warm.prompt == item.prompt[:512]


def test_an_unknown_workload_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match=r"no workload 'W9'.*W1, W8"):
        workloads(("W9",), numbered_text())


def test_a_trace_is_read_in_order_of_arrival(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"at": 2, "prompt": "late", "max_tokens": 3}\n\n{"at": 0.5, "prompt": [1, 2], "max_tokens": 1}\n'
    )
    assert read_trace(path) == (Item((1, 2), 1, 0.5), Item("late", 3, 2.0))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ('{"prompt": "a", "max_tokens": 1}', "'at' is None"),
        ('{"at": -1, "prompt": "a", "max_tokens": 1}', "'at' is -1"),
        ('{"at": NaN, "prompt": "a", "max_tokens": 1}', "'at' is nan"),
        ('{"at": 0, "prompt": "a"}', "'max_tokens' is None"),
        ('{"at": 0, "prompt": "a", "max_tokens": 0}', "'max_tokens' is 0"),
        ('{"at": 0, "prompt": "a", "max_tokens": true}', "'max_tokens' is True"),
        ('{"at": 0, "prompt": [1, "b"], "max_tokens": 1}', "'prompt' is neither"),
        ('{"at": 0, "prompt": "", "max_tokens": 1}', "'prompt' is neither"),
    ],
)
def test_a_bad_line_of_a_trace_is_refused_with_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 0, "prompt": "a", "max_tokens": 1}\n' + line + "\n")
    with pytest.raises(InvalidRequestError, match=rf"line 2: .*{message}"):
        read_trace(path)


def test_a_trace_that_is_empty_or_missing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(InvalidRequestError, match=name):
            read_trace(tmp_path / name)


# ---------------------------------------------------------------------- options


def test_only_one_arrival_process_may_be_given() -> None:
    with pytest.raises(InvalidRequestError, match="give one"):
        plan(Work(clients=2, rates=(1.0,)), numbered_text)
    (phase,) = plan(Work(requests=5), numbered_text)
    assert (phase.clients, len(phase.items)) == (8, 5)
    phases = plan(Work(rates=(1.0, 2.0), requests=5), numbered_text)
    assert [phase.rate for phase in phases] == [1.0, 2.0]
    assert phases[0].items[0].prompt != phases[1].items[0].prompt, "the second rate would get prefix hits"
    assert [item.at * 1.0 for item in phases[0].items] == pytest.approx(
        [item.at * 2.0 for item in phases[1].items]
    )


def test_a_trace_needs_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"at": 1, "prompt": "a", "max_tokens": 1}\n{"at": 3, "prompt": "b", "max_tokens": 1}\n')

    def no_text() -> Text:
        raise AssertionError("opened")

    (phase,) = plan(Work(trace=path), no_text)
    assert phase.rate == 0.5


def test_durations_lengths_and_rates_are_parsed() -> None:
    assert parse_duration("250ms", "--ttft") == 0.25
    assert parse_duration("1.5s", "--ttft") == 1.5
    assert parse_duration(None, "--ttft") is None
    assert parse_lengths("128", "--max-tokens") == Lengths(128, 128)
    assert parse_lengths("16-512", "--max-tokens") == Lengths(16, 512)
    assert parse_rates("1,2.5", "--rates") == (1.0, 2.5)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        *((parse_duration, text) for text in ("250", "fast", "-1s", "0s", "infs")),
        *((parse_lengths, text) for text in ("", "0", "9-3", "a-b", "5-", "-5")),
        *((parse_rates, text) for text in ("", "0", "1,,2", "nan", "inf", "-1")),
    ],
)
def test_an_invalid_option_is_refused_by_name(parse: Callable[[str, str], object], text: str) -> None:
    with pytest.raises(InvalidRequestError, match="--option"):
        parse(text, "--option")


def test_the_address_may_end_in_v1_and_never_shows_its_password() -> None:
    client = Client("http://me:secret@localhost:8000/base/v1/")
    assert client.url == "http://localhost:8000/base"
    assert client.message("GET", "/v1/models").startswith(
        b"GET /base/v1/models HTTP/1.1\r\nHost: localhost:8000\r\n"
    )
    assert Client("localhost").port == 80
    for bad in ("ftp://x", "http://", "http://x:99999999", "http://x:port", "http://a..b", "http://[x"):
        with pytest.raises(InvalidRequestError, match="is not the address of a server"):
            Client(bad)


def test_a_request_has_only_the_fields_that_the_server_accepts() -> None:
    item = Item((1, 2), 7)
    body = json.loads(Dialect("m").body(item, str))
    assert body["prompt"] == [1, 2] and body["max_tokens"] == body["min_tokens"] == 7
    assert body["ignore_eos"] and body["stream"] and body["stream_options"] == {"include_usage": True}
    plain = Dialect("m", api="chat", takes_ids=False, takes_exact_length=False, takes_usage=False)
    assert json.loads(plain.body(item, lambda ids: "text")) == {
        "model": "m",
        "max_tokens": 7,
        "temperature": 0,
        "stream": True,
        "messages": [{"role": "user", "content": "text"}],
    }


# ---------------------------------------------------------------------- the machine


def test_a_process_with_brackets_in_its_name_is_parsed() -> None:
    line = "42 (a (b) c) S 7 40 40 0 -1 4194304 1 2 3 4 100 23 5 6 20 0 1 0 99 1 1"
    assert serve_machine.parse_stat(line) == Process(42, 7, 40, "a (b) c", 123)


def test_cpu_time_is_split_into_client_server_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    own_pid, server, other = os.getpid(), 1_000_001, 1_000_002
    monkeypatch.setattr(serve_machine, "find_server", lambda host, port, processes: frozenset({server}))

    def snapshot(at: float, busy: float, client: float, **seconds: float) -> Snapshot:
        processes = {
            pid: Process(pid, 1, pid, name, int(seconds.get(name, 0) * tick))
            for pid, name in ((own_pid, "client"), (server, "server"), (other, "other"))
        }
        return Snapshot(at, int(busy * tick), 0, client, processes)

    before = snapshot(10.0, 100.0, 1.0, server=50.0, other=20.0)
    after = snapshot(20.0, 118.0, 3.0, server=60.0, other=25.0)
    use = serve_machine.use_between(before, after, "localhost", 1)
    assert use.client == pytest.approx(0.2)
    assert use.server == pytest.approx(1.0)
    assert use.others == pytest.approx(0.6)
    assert use.loudest == ("other 50%",)
    assert dataclasses.replace(use, cores=2).is_disturbed
    assert not dataclasses.replace(use, cores=2, others=0.09).is_disturbed
    monkeypatch.setattr(serve_machine, "find_server", lambda host, port, processes: frozenset())
    unseen = serve_machine.use_between(before, after, "localhost", 1)
    assert unseen.others is None and not unseen.is_disturbed, "the server is among the others"
    elsewhere = serve_machine.use_between(before, after, "192.0.2.1", 1)
    assert elsewhere.others == pytest.approx(1.6)
    assert not use.client_is_busy and dataclasses.replace(use, client=0.9).client_is_busy


def test_the_server_is_its_whole_process_tree_without_ancestors_of_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own_pid = os.getpid()
    process_list = [
        Process(1, 0, 1, "init", 0),
        Process(10, 1, 10, "shell", 0),
        Process(own_pid, 10, own_pid, "bench", 0),
        Process(20, 10, 20, "supervisor", 0),
        Process(21, 20, 20, "http", 0),
        Process(22, 20, 20, "engine", 0),
        Process(23, 22, 22, "worker", 0),
        Process(30, 10, 30, "other", 0),
    ]
    processes = {process.pid: process for process in process_list}
    monkeypatch.setattr(serve_machine, "_owners", lambda inodes, processes: {21})
    assert serve_machine.find_server("127.0.0.1", 1, processes) == {20, 21, 22, 23}
    in_a_script = {pid: dataclasses.replace(process, group=10) for pid, process in processes.items()}
    assert serve_machine.find_server("127.0.0.1", 1, in_a_script) == {20, 21, 22, 23}
    assert serve_machine.find_server("192.0.2.1", 1, processes) == frozenset(), "not this machine"


# ---------------------------------------------------------------------- the report

QUIET = MachineUse(cores=2, load_average=0.1, client=0.1, server=1.0, others=0.0, loudest=())


def phase_result(
    name: str, records: list[Record], rate: float | None = None, use: MachineUse = QUIET
) -> PhaseResult:
    return PhaseResult(name, rate, summarise(records, Targets(first_token=0.5)), use, 0, tuple(records))


def report_of(*phases: PhaseResult, model: str = "m") -> Report:
    return Report("http://localhost:1", Dialect(model), Targets(first_token=0.5), phases)


def many_phases() -> Report:
    source = random.Random(0)
    phases = []
    for rate in (1.0, 2.0, 4.0):
        records = [
            record(n / rate, *(n / rate + source.random() + 0.1 * k for k in range(1, 9))) for n in range(9)
        ]
        records = [
            dataclasses.replace(r, chunk_times=tuple(sorted(r.chunk_times)), due=r.began) for r in records
        ]
        phases.append(phase_result(f"{rate:g}/s", [*records, failed()], rate))
    return report_of(*phases, model="<script>alert('x') & co</script>")


def test_the_html_report_is_well_formed_and_fetches_nothing() -> None:
    text = serve_html.page(many_phases())
    tree = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert "<script>" not in text
    # The plots of the sweep, of the distributions, and one over time per phase.
    assert len(list(tree.iter("svg"))) == 3 + 3 + 3
    for element in tree.iter():
        assert element.tag not in ("script", "link", "img", "iframe", "image", "use")
        assert not {"src", "href", "onload"} & set(element.attrib)
    assert "url(" not in text and "@import" not in text


def test_every_point_of_a_plot_is_inside_the_plot() -> None:
    tree = ElementTree.fromstring(serve_html.page(many_phases()).removeprefix("<!DOCTYPE html>"))
    places = [
        tuple(float(number) for number in point.split(","))
        for line in tree.iter("polyline")
        for point in line.attrib["points"].split()
    ]
    places += [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in tree.iter("circle")]
    assert len(places) > 100
    assert all(0 <= x <= serve_html.WIDTH and 0 <= y <= serve_html.HEIGHT for x, y in places)


def test_a_run_where_everything_failed_or_took_no_time_still_makes_a_page() -> None:
    instant = record(0.0, 0.0, 0.0)
    for records in ([failed(0.0, 0.0)], [instant], [record(0.0, 1.0)]):
        ElementTree.fromstring(
            serve_html.page(report_of(phase_result("p", records))).removeprefix("<!DOCTYPE html>")
        )


def test_a_long_series_is_thinned_and_keeps_its_last_point() -> None:
    points = [(float(n), 0.0) for n in range(100_001)]
    thin = serve_html._thinned(points)
    assert len(thin) <= serve_html.MOST_POINTS + 1
    assert (thin[0], thin[-1]) == (points[0], points[-1])


@pytest.mark.parametrize("is_log", [False, True])
def test_ticks_are_round_and_inside_the_axis(is_log: bool) -> None:
    for high in (0.3, 1.0, 7.0, 99.0, 12_345.0):
        scale = serve_html._scale([0.2, high], 0.0, 100.0, is_log)
        ticks = scale.ticks()
        assert 2 <= len(ticks) <= 7
        assert all(-0.01 <= scale.place(tick) <= 100.01 for tick in ticks)
        assert scale.high >= high


def test_the_json_report_has_every_request_and_reads_back() -> None:
    document = json.loads(json.dumps(serve_report.document(many_phases())))
    assert [phase["name"] for phase in document["phases"]] == ["1/s", "2/s", "4/s"]
    first = document["phases"][0]
    assert len(first["requests"]) == 10 and len(first["requests"][0]["gaps"]) == 7
    assert first["summary"]["failures"] == {"refused": 1}
    assert first["summary"]["end_to_end"]["count"] == 9
    assert first["machine"]["is_disturbed"] is False


def test_the_table_shows_every_phase_and_measure(capsys: pytest.CaptureFixture[str]) -> None:
    serve_report.print_report(many_phases())
    out = capsys.readouterr().out
    for word in ("1/s", "2/s", "4/s", "first token", "gap", "end to end", "p99", "goodput", "within targets"):
        assert word in out


def test_text_from_a_server_has_no_effect_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = dataclasses.replace(failed(), failure_detail="[/] [red]no\x1b[2J")
    serve_report.print_report(report_of(phase_result("[bold]p", [hostile]), model="[/b]\x07"))
    out = capsys.readouterr().out
    assert "[/] [red]no\\x1b[2J" in out and "[bold]p" in out and "[/b]\\x07" in out


def test_notes_name_what_makes_figures_unreliable() -> None:
    busy = dataclasses.replace(QUIET, others=0.5, loudest=("compiler 50%",), client=0.9)
    records = [record(0.0, 1.0, has_usage=False, asked_tokens=9, due=-0.1), failed(kind="HTTP 503")]
    phase = dataclasses.replace(phase_result("p", records, use=busy), reconnects=3)
    text = "\n".join(serve_report.notes(report_of(phase)))
    for words in (
        "1 of 2 failed, HTTP 503: why",
        "DISTURBED: other processes used 0.50 of 2 cores (compiler 50%)",
        "the client itself used 90% of a core",
        "sent late, 100.0 ms",
        "3 requests were sent again, because the server had closed their connection",
        "1 of 1 answers were shorter than requested",
        "each chunk was counted as one token",
    ):
        assert words in text
    assert serve_report.notes(report_of(phase_result("p", [record(0.0, 1.0)]))) == []


def test_notes_name_bundled_tokens_prefix_hits_and_a_run_that_was_too_short() -> None:
    bundled = [record(0.0, 1.0, 2.0, tokens=8, cached_tokens=5, due=0.0)]
    text = "\n".join(serve_report.notes(report_of(phase_result("p", bundled, rate=4.0))))
    assert "4.00 tokens on average" in text
    assert "50% of the prompt tokens came from a cache" in text
    assert "send more requests" in text


def test_a_note_says_that_a_server_on_another_machine_is_not_observed() -> None:
    elsewhere = dataclasses.replace(QUIET, server=None)
    (note,) = serve_report.notes(report_of(phase_result("p", [record(0.0, 1.0)], use=elsewhere)))
    assert "not found on this machine" in note


def test_a_report_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="cannot write"):
        serve_report.write_json(report_of(), tmp_path / "missing" / "report.json")
