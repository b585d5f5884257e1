"""Traces of requests: a real server exports them to a real receiver over OTLP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from otlp_receiver import ReceivedSpan, Receiver, running_receiver
from server_process import MESSAGES, MODEL, NOOP, SLOW, SOURCE, Server, api_key, running_server, wait_for
from vector_models import embedder_path, noop_embedder, noop_reranker

from weft import __version__
from weft.errors import WeftError
from weft.request import FinishReason, GenerationResult, PreemptedTime, RequestId, RequestState
from weft.server import otlp
from weft.server.traces import Span, Trace, _phases_of_answer
from weft.simulation.run import Simulation
from weft.simulation.scenario import draw

sys.path.insert(0, str(Path(__file__).parents[1] / "scripted"))

from scripted_server import ScriptedServer

SECRET = "do not export this"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
STEP = 0.01
TOLERANCE = 2_000_000
"""Nanoseconds: the clocks are read one after another."""
SERVER_KIND = 2


@pytest.fixture(scope="module", autouse=True)
def export_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
        yield


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with running_receiver() as running:
        yield running


@pytest.fixture(scope="module")
def server(default_model_path: Path, receiver: Receiver) -> Iterator[Server]:
    """A server whose steps take 10 ms, with a key."""
    with running_server(
        default_model_path,
        backend_options=SLOW,
        otlp_endpoint=receiver.url,
        api_keys=[api_key("team", max_priority=3)],
        headers={"Authorization": "Bearer team"},
    ) as running:
        yield running


def check_times(span: ReceivedSpan) -> None:
    """A child is inside its parent."""
    assert span.began <= span.ended
    for child in span.children:
        assert span.began - TOLERANCE <= child.began <= child.ended <= span.ended + TOLERANCE, (span, child)
        check_times(child)


def names(span: ReceivedSpan) -> list[str]:
    return [child.name for child in span.children]


def check_phases(span: ReceivedSpan) -> None:
    """One answer: each phase begins where the one before ends."""
    assert names(span) == ["prepare", "queue", "prefill", "decode"]
    for before, after in pairwise(span.children):
        assert abs(after.began - before.ended) <= TOLERANCE
    check_times(span)


# --- requests of clients ----------------------------------------------------------------------------------------------


def test_a_request_has_a_span_with_the_attributes_of_the_genai_conventions(
    server: Server, receiver: Receiver
) -> None:
    messages = [{"role": "user", "content": SECRET}]
    sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "presence_penalty": 0.25}
    fields = {"model": "alias", "max_tokens": 6, "ignore_eos": True, "session_id": "talk 1"}
    answer = server.chat(messages=messages, **fields, **sampling)
    span = receiver.request(answer.headers["x-request-id"])
    check_phases(span)
    usage = answer.json()["usage"]
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "weft",
        "gen_ai.request.model": "alias",
        "gen_ai.response.model": MODEL,
        "gen_ai.response.id": answer.headers["x-request-id"],
        "gen_ai.conversation.id": "talk 1",
        "gen_ai.output.type": "text",
        "gen_ai.request.stream": False,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.request.presence_penalty": 0.25,
        "gen_ai.request.max_tokens": 6,
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.response.finish_reasons": ["length"],
        "server.address": "127.0.0.1",
        "server.port": server.port,
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "weft.request_id": answer.headers["x-request-id"],
        "weft.key": "team",
        "weft.priority": "normal",
        "weft.preemptions": 0,
    }
    assert span.attributes == expected
    assert (span.name, span.kind, span.is_error) == ("chat alias", SERVER_KIND, False)
    assert span.parent_id == "" and span.state == ""
    assert span.resource["service.name"] == "weft" and span.resource["service.version"] == __version__
    [decode] = span.named("decode")
    assert decode.ended - decode.began >= 5 * STEP * 1e9
    text = answer.json()["choices"][0]["message"]["content"]
    for body in receiver.bodies:
        assert SECRET.encode() not in body and text.encode() not in body


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 3}, "text_completion"),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 3}, "chat"),
        ("/v1/responses", {"input": "Hello", "max_output_tokens": 3}, "chat"),
        ("/api/chat", {"messages": MESSAGES, "options": {"num_predict": 3}}, "chat"),
        ("/api/generate", {"prompt": "Hello", "options": {"num_predict": 3}}, "text_completion"),
    ],
)
def test_streams_of_every_api_have_spans(
    server: Server, receiver: Receiver, path: str, body: dict[str, Any], operation: str
) -> None:
    answer = server.client.post(path, json={"model": MODEL, "stream": True, **body})
    assert answer.status_code == 200
    span = receiver.request(answer.headers["x-request-id"])
    check_times(span)
    assert names(span)[:3] == ["prepare", "queue", "prefill"]
    assert span.name == f"{operation} {MODEL}" and span.attributes["http.route"] == path
    assert span.attributes["gen_ai.request.stream"] is True
    assert span.attributes["gen_ai.response.time_to_first_chunk"] >= STEP


def test_a_request_for_json_says_so_and_one_without_a_session_has_no_conversation(
    server: Server, receiver: Receiver
) -> None:
    schema = {"name": "answer", "schema": {"type": "object", "properties": {}, "additionalProperties": False}}
    answer = server.chat(response_format={"type": "json_schema", "json_schema": schema}, max_tokens=8)
    span = receiver.request(answer.headers["x-request-id"])
    assert span.attributes["gen_ai.output.type"] == "json"
    assert "gen_ai.conversation.id" not in span.attributes


def test_a_request_continues_the_trace_of_its_client(server: Server, receiver: Receiver) -> None:
    state = "congo=t61rcWkgMzE,rojo=00f067aa0ba902b7"
    answer = server.client.post(
        "/v1/chat/completions",
        json={"messages": MESSAGES, "max_tokens": 3, "ignore_eos": True},
        headers={"traceparent": PARENT, "tracestate": state},
    )
    span = receiver.request(answer.headers["x-request-id"])
    assert (span.trace_id, span.parent_id) == (TRACE_ID, PARENT_ID)
    check_phases(span)
    assert {one.trace_id for one in span.children} == {TRACE_ID}
    assert {one.state for one in (span, *span.children)} == {state}


@pytest.mark.parametrize("header", ["no parent", f"00-{'0' * 32}-{PARENT_ID}-01", "00-" + "1" * 300])
def test_an_invalid_traceparent_begins_a_new_trace(server: Server, receiver: Receiver, header: str) -> None:
    answer = server.client.post(
        "/v1/completions", json={"prompt": "Hello", "max_tokens": 1}, headers={"traceparent": header}
    )
    span = receiver.request(answer.headers["x-request-id"])
    assert span.parent_id == "" and span.trace_id not in ("0" * 32, TRACE_ID)


def test_a_request_of_a_trace_that_is_not_sampled_has_no_spans(server: Server, receiver: Receiver) -> None:
    unsampled = server.client.post(
        "/v1/completions",
        json={"prompt": "Hello", "max_tokens": 1},
        headers={"traceparent": PARENT[:-2] + "00"},
    ).headers["x-request-id"]
    after = server.complete(max_tokens=1).headers["x-request-id"]
    receiver.request(after)  # traces are exported in order
    assert unsampled not in {one.attributes.get("weft.request_id") for one in receiver.spans()}


def test_each_answer_has_its_own_spans(server: Server, receiver: Receiver) -> None:
    answer = server.complete(n=3, max_tokens=4, ignore_eos=True)
    span = receiver.request(answer.headers["x-request-id"])
    check_times(span)
    for name in ("queue", "prefill", "decode"):
        assert sorted(one.attributes["weft.answer"] for one in span.named(name)) == [0, 1, 2]
    assert span.attributes["gen_ai.request.choice.count"] == 3
    assert span.attributes["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert span.attributes["gen_ai.usage.output_tokens"] == 12


def test_a_request_with_many_answers_has_a_bounded_number_of_spans(
    server: Server, receiver: Receiver
) -> None:
    answer = server.complete(n=100, max_tokens=2, ignore_eos=True)
    span = receiver.request(answer.headers["x-request-id"])
    assert len(span.named("queue")) == 32 and len(span.attributes["gen_ai.response.finish_reasons"]) == 100


def test_a_cancelled_request_has_the_spans_of_its_phases_and_is_no_error(
    server: Server, receiver: Receiver
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5000, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        request_id = answer.headers["x-request-id"]
        lines = answer.iter_lines()
        while '"content"' not in next(lines):
            pass
    span = receiver.request(request_id)
    check_times(span)
    assert names(span)[:3] == ["prepare", "queue", "prefill"] and not span.is_error
    assert span.attributes["weft.client_gone"] is True
    assert span.attributes["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert 0 < span.attributes["gen_ai.usage.output_tokens"] < 5000


def test_a_client_that_leaves_before_a_whole_answer_is_no_error(server: Server, receiver: Receiver) -> None:
    body = {"prompt": "Hello", "max_tokens": 5000, "ignore_eos": True}
    with pytest.raises(httpx.TimeoutException):
        server.client.post("/v1/completions", json=body, headers={"x-request-id": "left"}, timeout=1)
    span = receiver.request("left")
    assert span.attributes["weft.client_gone"] is True and not span.is_error


def test_a_request_after_its_deadline_is_an_error_with_the_spans_of_its_phases(
    server: Server, receiver: Receiver
) -> None:
    for deadline in (0.2, 1, 5, 25):  # until it is long enough for a first token on this machine
        answer = server.complete(max_tokens=8000, ignore_eos=True, deadline=deadline)
        assert answer.status_code == 504
        span = receiver.request(answer.headers["x-request-id"])
        if "prefill" in names(span):
            break
    assert names(span)[:3] == ["prepare", "queue", "prefill"]
    assert span.is_error and span.attributes["error.type"] == "deadline_exceeded"
    assert span.attributes["http.response.status_code"] == 504
    assert "gen_ai.response.model" not in span.attributes


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        ({"prompt": SECRET, "temperature": -1}, 400, "invalid_value"),
        ({"prompt": SECRET, "model": "unknown"}, 404, "model_not_found"),
        ({"prompt": [1] * 9000}, 400, "context_length_exceeded"),
    ],
)
def test_a_refused_request_is_an_error(
    server: Server, receiver: Receiver, body: dict[str, Any], status: int, error: str
) -> None:
    answer = server.client.post("/v1/completions", json=body)
    assert answer.status_code == status, answer.text
    span = receiver.request(answer.headers["x-request-id"])
    assert span.is_error and span.attributes["error.type"] == error
    assert span.attributes["http.response.status_code"] == status
    assert span.attributes["gen_ai.request.model"] == body.get("model", MODEL)
    assert "queue" not in names(span)


def test_a_request_without_a_key_is_an_error(server: Server, receiver: Receiver) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "Hello"})
    assert answer.status_code == 401
    span = receiver.request(answer.headers["x-request-id"])
    assert span.is_error and span.attributes["http.response.status_code"] == 401 and not span.children


def test_requests_that_generate_nothing_have_no_spans(server: Server, receiver: Receiver) -> None:
    others = [
        server.client.get(path).headers["x-request-id"] for path in ("/health", "/metrics", "/v1/models")
    ]
    others.append(server.client.post("/tokenize", json={"prompt": "Hello"}).headers["x-request-id"])
    receiver.request(server.complete(max_tokens=1).headers["x-request-id"])
    assert not {one.attributes.get("weft.request_id") for one in receiver.spans()} & set(others)


# --- other servers ----------------------------------------------------------------------------------------------------


def test_requests_for_vectors_and_scores_have_a_span(default_model_path: Path, receiver: Receiver) -> None:
    tokenizer = embedder_path()
    models = [noop_embedder(tokenizer), noop_reranker(tokenizer)]
    cases: list[tuple[str, dict[str, Any], str, str, int]] = [
        ("/v1/embeddings", {"input": ["one", "two"]}, "embeddings", "noop-embedder", 2),
        ("/api/embed", {"input": "one", "model": "noop-embedder"}, "embeddings", "noop-embedder", 1),
        ("/api/embeddings", {"prompt": "one", "model": "noop-embedder"}, "embeddings", "noop-embedder", 1),
        ("/v1/rerank", {"query": SECRET, "documents": ["a", "b", "c"]}, "rerank", "noop-reranker", 3),
        ("/v1/score", {"text_1": "a", "text_2": "b", "model": "noop-reranker"}, "score", "noop-reranker", 1),
    ]
    with running_server(default_model_path, vector_models=models, otlp_endpoint=receiver.url) as server:
        for path, body, operation, model, num_inputs in cases:
            before = server.metric("prompt_tokens_total")
            answer = server.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            used = server.metric("prompt_tokens_total") - before
            span = receiver.request(answer.headers["x-request-id"])
            assert span.attributes == {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "weft",
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.usage.input_tokens": used,
                "server.address": "127.0.0.1",
                "server.port": server.port,
                "http.request.method": "POST",
                "http.route": path,
                "http.response.status_code": 200,
                "weft.request_id": answer.headers["x-request-id"],
                "weft.inputs": num_inputs,
            }
            assert used > 0 and not span.children and not span.is_error
            assert (span.name, span.kind) == (f"{operation} {model}", SERVER_KIND)
        refused = server.client.post("/v1/embeddings", json={"input": [], "model": "noop-embedder"})
        span = receiver.request(refused.headers["x-request-id"])
        assert span.is_error and span.attributes["gen_ai.request.model"] == "noop-embedder"
        assert "gen_ai.response.model" not in span.attributes
        unread = server.client.post("/v1/rerank", content=b"{")
        span = receiver.request(unread.headers["x-request-id"])
        assert span.is_error and span.name == "rerank" and "gen_ai.request.model" not in span.attributes
    assert all(SECRET.encode() not in body for body in receiver.bodies)


def test_a_request_of_an_engine_that_dies_is_an_error(default_model_path: Path, receiver: Receiver) -> None:
    with running_server(
        default_model_path, backend_options=SLOW, otlp_endpoint=receiver.url + "/v1/traces"
    ) as server:
        body = {"prompt": "Hello", "max_tokens": 5000, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(server.engine_pid(), signal.SIGKILL)
            assert '"engine_died"' in "".join(lines)
        span = receiver.request(answer.headers["x-request-id"])
    assert span.is_error and span.attributes["error.type"] == "engine_died"
    assert span.attributes["http.response.status_code"] == 200


@pytest.mark.parametrize(("mode", "name"), [("swap", "swap"), ("recompute", "recompute")])
def test_preemptions_are_spans_inside_the_phase_that_they_interrupt(
    default_model_path: Path, receiver: Receiver, mode: str, name: str
) -> None:
    engine = {
        "scheduler": {"max_running": 1, "policy": "priority", "preemption": mode},
        "cache": {"num_blocks": 64, "block_size": 16, "swap_blocks": 64},
    }
    with running_server(
        default_model_path,
        backend_options={**SLOW, "max_context": 1024},
        engine=engine,
        otlp_endpoint=receiver.url,
    ) as server:
        body = {
            "prompt": [*range(2, 40)],
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
            "priority": "low",
        }
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert server.complete(priority="critical", max_tokens=20, ignore_eos=True).status_code == 200
            for _ in lines:
                pass
        span = receiver.request(answer.headers["x-request-id"])
    check_phases(span)
    [decode] = span.named("decode")
    [preempted] = decode.children
    assert preempted.name == name and preempted.ended - preempted.began >= 19 * STEP * 1e9
    assert span.attributes["weft.preemptions"] == 1 and span.attributes["gen_ai.usage.output_tokens"] == 200


def test_tool_calls_have_a_span_and_the_standard_variables_are_enough(
    default_model_path: Path, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "kitchen")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    script = {
        "rules": [{"contains": ["Read it"], "text": "Yes.\n", "calls": [["bash", {"command": SECRET}]]}]
    }
    tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
    body = {"messages": [{"role": "user", "content": "Read it"}], "tools": tools, "max_tokens": 200}
    server = ScriptedServer(tmp_path, default_model_path, script)
    server.start()
    try:
        for stream in (False, True):
            answer = httpx.post(
                f"{server.url}/v1/chat/completions", json={**body, "stream": stream}, timeout=60
            )
            assert answer.status_code == 200 and "tool_calls" in answer.text
            span = receiver.request(answer.headers["x-request-id"])
            [parsing] = span.named("parse_tools")
            assert span.named("prefill")[0].ended <= parsing.ended + TOLERANCE
            check_times(span)
            assert span.attributes["gen_ai.response.finish_reasons"] == ["tool_calls"]
            assert span.resource["service.name"] == "kitchen"
            assert span.resource["deployment.environment.name"] == "test"
        assert receiver.headers[-1]["x-tenant"] == "blue"
        assert not [body for body in receiver.bodies if SECRET.encode() in body]
    finally:
        server.stop()


def test_lines_of_batches_have_spans(default_model_path: Path, receiver: Receiver) -> None:
    with running_server(default_model_path, backend_options=NOOP, otlp_endpoint=receiver.url) as server:
        line = {
            "custom_id": "1",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": "A", "max_tokens": 2},
        }
        files = {"file": ("lines.jsonl", json.dumps(line))}
        uploaded = server.client.post("/v1/files", data={"purpose": "batch"}, files=files).json()
        made = server.client.post(
            "/v1/batches", json={"input_file_id": uploaded["id"], "endpoint": "/v1/completions"}
        )
        assert made.status_code == 200

        def spans() -> list[ReceivedSpan]:
            return [one for one in receiver.spans() if one.attributes.get("weft.idle_work")]

        wait_for(spans)
        [span] = spans()
        assert names(span)[:3] == ["prepare", "queue", "prefill"] and span.kind != SERVER_KIND


def test_traces_that_wait_are_exported_when_the_server_stops(
    default_model_path: Path, receiver: Receiver
) -> None:
    delay = {"OTEL_BSP_SCHEDULE_DELAY": "600000"}
    with running_server(default_model_path, otlp_endpoint=receiver.url, environment=delay) as server:
        ids = [server.complete(max_tokens=1).headers["x-request-id"] for _ in range(20)]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    found = {one.attributes.get("weft.request_id") for one in receiver.spans()}
    assert found >= set(ids)


# --- a collector that fails -------------------------------------------------------------------------------------------


def ask_many(server: Server, count: int) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: server.complete(max_tokens=2), range(count)))
    assert {answer.status_code for answer in answers} == {200}


def test_a_collector_that_refuses_costs_traces_that_are_counted(
    default_model_path: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with (
        running_receiver() as refusing,
        log.open("w") as stream,
        running_server(
            default_model_path, otlp_endpoint=refusing.url, stderr=stream, log_format="json"
        ) as server,
    ):
        refusing.status = 400
        ask_many(server, 5)
        wait_for(lambda: server.metric("traces_lost_total") == 5)
        refusing.status = 200
        answer = server.complete(max_tokens=1)
        refusing.request(answer.headers["x-request-id"])
        assert server.metric("traces_lost_total") == 5
        wait_for(lambda: "traces_exported" in log.read_text())
    events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
    assert events.count("traces_lost") == 1 and events.count("traces_exported") == 1


def test_a_collector_that_does_not_answer_delays_no_request_and_no_stop(default_model_path: Path) -> None:
    with (
        running_receiver() as stuck,
        running_server(default_model_path, otlp_endpoint=stuck.url) as server,
    ):
        stuck.is_open.clear()
        ask_many(server, 50)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0


def test_a_full_queue_drops_traces_and_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "_MAX_TRACES", 3)
    with running_receiver() as stuck:
        stuck.is_open.clear()
        exporter = otlp.open_exporter(stuck.url, lambda *arguments, **fields: None, {})
        assert exporter is not None
        exporter.put(trace("first"))
        wait_for(lambda: stuck.num_waiting == 1)  # the thread is inside the export
        for index in range(10):
            exporter.put(trace(f"{index}"))
        assert exporter.num_lost == 7
        stuck.is_open.set()
        exporter.close()
        assert [span.name for span in stuck.spans()] == ["first", "0", "1", "2"]


def trace(name: str) -> Trace:
    return Trace(Span(name, 1.0, 2.0), 0.0)


# --- off by default ---------------------------------------------------------------------------------------------------


def quiet(*arguments: Any, **fields: Any) -> None:
    raise AssertionError(arguments)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"OTEL_SERVICE_NAME": "x"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_there_is_no_exporter_unless_a_collector_is_named(environment: dict[str, str]) -> None:
    assert otlp.open_exporter(None, quiet, environment) is None


def test_a_server_without_traces_imports_nothing_of_opentelemetry() -> None:
    code = (
        "import sys\nfrom weft.server import lifecycle, otlp\n"
        "assert otlp.open_exporter(None, print, {}) is None\n"
        "assert not [name for name in sys.modules if name.startswith(('opentelemetry', 'google.protobuf'))]"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, env=environment)


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317"])
def test_an_endpoint_that_is_no_url_is_refused_with_an_example(endpoint: str) -> None:
    with pytest.raises(WeftError, match=r"otlp_endpoint is .*; allowed: a URL such as http://127.0.0.1:4318"):
        otlp.open_exporter(endpoint, quiet, {})


def test_without_the_extra_the_setting_is_an_error_and_the_standard_variable_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in list(sys.modules):
        if name.startswith("opentelemetry"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(WeftError, match=r"pip install 'weft\[otel\]'"):
        otlp.open_exporter("http://127.0.0.1:1", quiet, {})
    warnings: list[str] = []
    log: Callable[..., object] = lambda name, message, level: warnings.append(f"{level}: {message}")  # noqa: E731
    assert otlp.open_exporter(None, log, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}) is None
    [warning] = warnings
    assert warning.startswith("warning: There are no traces") and "weft[otel]" in warning


# --- phases -----------------------------------------------------------------------------------------------------------


def result(
    waiting: float, prefill: float, decode: float, first: float | None, *preempted: PreemptedTime
) -> GenerationResult:
    return GenerationResult(
        RequestId("r"), (), "", RequestState.COMPLETED, FinishReason.STOP, None, waiting, prefill, decode, first,
        0, 1, 0, len(preempted), preempted_times=preempted,
    )  # fmt: skip


def phases(*spans: Span) -> list[Any]:
    return [
        (one.name, round(one.began, 9), round(one.ended, 9), *([phases(*one.children)] * bool(one.children)))
        for one in spans
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (result(1, 2, 3, 3.0), [("queue", 10, 11), ("prefill", 11, 13), ("decode", 13, 16)]),
        (result(1, 2, 0, 3.0), [("queue", 10, 11), ("prefill", 11, 13)]),
        (result(4, 0, 0, None), [("queue", 10, 14)]),
        (result(1, 2, 0, None), [("queue", 10, 11), ("prefill", 11, 13)]),
        (
            result(1 + 2, 3, 4, 6.0, PreemptedTime(2.0, 4.0, True)),
            [("queue", 10, 11), ("prefill", 11, 16, [("swap", 12, 14)]), ("decode", 16, 20)],
        ),
        (
            result(1 + 2, 3, 4, 3.0, PreemptedTime(5.0, 7.0, False)),
            [("queue", 10, 11), ("prefill", 11, 13), ("decode", 13, 20, [("recompute", 15, 17)])],
        ),
    ],
)
def test_phases_are_placed_by_the_times_of_the_result(given: GenerationResult, expected: list[Any]) -> None:
    assert phases(*_phases_of_answer(given, 10.0, {})) == expected


def test_times_of_preemptions_agree_with_the_other_times_in_every_scenario() -> None:
    num_preempted = 0
    for seed in range(300, 380):
        simulation = Simulation(draw(seed))
        simulation.run()
        for one in simulation.engine._delivery.results.values():
            times = one.preempted_times
            assert len(times) == one.preemptions
            edges = [0.0, *(edge for time in times for edge in (time.began, time.ended)), one.total_time]
            assert all(a <= b + 1e-9 for a, b in pairwise(edges)), one
            assert sum(time.ended - time.began for time in times) <= one.waiting_time + 1e-9
            spans = list(_phases_of_answer(one, 0.0, {}))
            assert spans[-1].ended == pytest.approx(one.total_time, abs=1e-6)
            assert not times or spans[0].ended <= times[0].began + 1e-6, (
                "it was preempted before its admission"
            )
            num_preempted += len(times)
    assert num_preempted > 20
