"""Bad inputs, numbered as in the list of forty: the server responds correctly and keeps working."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_shapes import family, message_of_error
from server_process import MESSAGES, SLOW, Server, api_key, running_server

from weft.server.api.formats import FORMATS


def error_of(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    assert response.status_code == status, response.text[:500]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    if param is not None:
        assert error["param"] == param, error
    return error


def raw(server: Server, sent: bytes, seconds: float = 60.0) -> bytes:
    """The bytes that the server sends back until it closes the connection."""
    received = b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=seconds) as connection:
        try:
            connection.sendall(sent)
            while part := connection.recv(65536):
                received += part
        except (ConnectionError, BrokenPipeError):
            pass
    return received


def memory(server: Server) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def test_01_huge_headers_close_the_connection_and_take_no_memory(server: Server) -> None:
    before = memory(server)
    start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    one = raw(server, start + b"X: " + b"a" * (60 << 20) + b"\r\n\r\n")
    many = raw(server, start + b"".join(b"X-%d: a\r\n" % i for i in range(300_000)) + b"\r\n")
    for answer in (one, many):
        assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
    assert memory(server) - before < 20_000  # KiB


def test_02_a_body_that_is_too_large_is_refused_before_it_is_read(server: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    announced = raw(server, head + b"Content-Length: 17000000\r\n\r\n")
    assert announced.startswith(b"HTTP/1.1 413")


PATHS = [*FORMATS, *(one.counting.path for one in FORMATS.values() if one.counting is not None)]
"""The routes of all APIs that read a prompt."""


@pytest.mark.parametrize("path", PATHS)
def test_02_a_chunked_body_that_is_too_large_is_refused_while_it_is_received(
    server: Server, path: str
) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * 100_000

    refused = server.client.post(path, content=chunks())
    assert refused.status_code == 413, refused.text
    assert "max_body_bytes" in message_of_error(family(path), refused.json())


@pytest.fixture(scope="module")
def strict_server(default_model_path: Path) -> Iterator[Server]:
    """A server with keys and a short queue."""
    keys, headers = [api_key("first"), api_key("second")], {"Authorization": "Bearer second"}
    with running_server(
        default_model_path, backend_options=SLOW, api_keys=keys, headers=headers, max_requests=2
    ) as server:
        yield server


@pytest.fixture(scope="module")
def impatient_server(default_model_path: Path) -> Iterator[Server]:
    """A server with short timeouts, only for tests of slow requests: on a busy machine any request may be slow."""
    with running_server(default_model_path, header_seconds=0.5, body_seconds=1.0) as server:
        yield server


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /hea",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
    ],
    ids=["nothing", "half the headers", "half the body"],
)
def test_03_a_request_that_arrives_too_slowly_gets_a_408(impatient_server: Server, sent: bytes) -> None:
    assert raw(impatient_server, sent).startswith(b"HTTP/1.1 408")
    assert impatient_server.client.get("/health").status_code == 200


def test_03_a_body_that_arrives_too_slowly_gets_an_error_in_the_form_of_its_route(
    impatient_server: Server,
) -> None:
    start = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{"
    with ThreadPoolExecutor(len(PATHS)) as pool:  # all at once: each takes a second
        answers = pool.map(lambda path: raw(impatient_server, start.format(path).encode()), PATHS)
        for path, answer in zip(PATHS, answers, strict=True):
            assert answer.startswith(b"HTTP/1.1 408"), (path, answer)
            head, _, body = answer.partition(b"\r\n\r\n")
            content = json.loads(body)
            assert "the request did not arrive" in message_of_error(family(path), content), path
            if family(path) == "anthropic":
                assert f"x-request-id: {content['request_id']}" in head.decode().splitlines()


def test_03_the_second_request_of_a_connection_has_a_timeout_too(
    impatient_server: Server,
) -> None:
    answer = raw(impatient_server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
    assert answer.count(b"HTTP/1.1 200") == 1 and answer.count(b"HTTP/1.1 408") == 1


@pytest.mark.parametrize("host", ["x/v1?y=", "localhost:8000/health", "a b", "[::1", ""])
def test_04_an_invalid_host_header_is_refused(server: Server, host: str) -> None:
    error_of(server.client.get("/version", headers={"Host": host}), 400)


def test_04_no_host_header_bypasses_the_api_key(strict_server: Server) -> None:
    for host in ("localhost/health", "localhost"):
        response = strict_server.client.get("/version", headers={"Host": host, "Authorization": ""})
        assert response.status_code in (400, 401)


@pytest.mark.parametrize(
    "key", ["", "Bearer", "Bearer wrong", "Bearer firs", "Basic first", "first", "Bearer é"]
)
def test_05_a_missing_or_wrong_key_is_refused_on_all_routes_but_health(
    strict_server: Server, key: str
) -> None:
    headers = {"Authorization": key.encode()}
    for path in ("/v1/models", "/metrics", "/version", "/ready", "/nowhere"):
        response = strict_server.client.get(path, headers=headers)
        error_of(response, 401)
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        error_of(strict_server.client.post(path, headers=headers, json={}), 401)
    assert strict_server.client.get("/health", headers=headers).status_code == 200


@pytest.mark.parametrize("key", ["first", "second"])
def test_05_each_of_several_keys_is_accepted(strict_server: Server, key: str) -> None:
    assert strict_server.client.get("/version", headers={"Authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8000"},
        {"Host": "192.168.0.7"},
        {"Host": "localhost.evil.example"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost.evil.example"},
    ],
)
def test_07_other_hosts_and_origins_cannot_reach_a_loopback_server(
    server: Server, headers: dict[str, str]
) -> None:
    error_of(server.client.post("/v1/completions", headers=headers, json={"prompt": "x"}), 403)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:1", "[::1]:80", "LOCALHOST"])
def test_07_host_names_of_this_machine_are_accepted(server: Server, host: str) -> None:
    assert server.client.get("/version", headers={"Host": host}).status_code == 200


def test_07_responses_have_no_cors_headers_by_default(server: Server) -> None:
    response = server.client.get("/version", headers={"Origin": server.url})
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e400}',
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x", "metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
    ],
    ids=lambda body: body[:32].decode("latin-1"),
)
def test_08_a_body_that_is_not_json_is_refused(server: Server, body: bytes) -> None:
    error_of(server.client.post("/v1/completions", content=body), 400)
    error_of(server.client.post("/v1/chat/completions", content=body.replace(b"prompt", b"messages")), 400)


FIELDS = (
    *("model", "stream", "stream_options", "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k"),
    *(
        "min_p",
        "typical_p",
        "xtc_probability",
        "xtc_threshold",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "seed",
    ),
    *(
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "priority",
        "deadline",
        "ttft_target",
        "cache_salt",
        "session_id",
    ),
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice"),
    *("guided_grammar", "grammar", "json_schema", "user", "metadata"),
)
CHAT_FIELDS = (
    *FIELDS,
    "messages",
    "logprobs",
    "top_logprobs",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
)
COMPLETION_FIELDS = (*FIELDS, "prompt", "logprobs", "echo", "suffix", "best_of")


@pytest.mark.parametrize("field", CHAT_FIELDS)
def test_09_a_wrong_type_in_a_chat_is_refused_with_its_field_and_null_is_the_default(
    server: Server, field: str
) -> None:
    # A list of lists is valid for no field; a dict would be valid for metadata, a string for stop.
    assert error_of(server.chat(**{field: [[{}]]}), 400)["param"].startswith(field)
    if field != "messages":
        assert server.chat(**{field: None, "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("field", COMPLETION_FIELDS)
def test_09_a_wrong_type_in_a_completion_is_refused_with_its_field(server: Server, field: str) -> None:
    fields = {"prompt": "x", field: [[{}]]}
    assert error_of(server.client.post("/v1/completions", json=fields), 400)["param"].startswith(field)


def test_10_an_unknown_model_is_404_and_a_wrong_method_405(server: Server) -> None:
    error_of(server.chat(model="no-such-model"), 404, "model")
    error_of(server.complete(model="no-such-model"), 404, "model")
    error_of(server.client.get("/v1/models/no-such-model"), 404, "model")
    error_of(server.client.get("/v1/chat/completions"), 405)
    error_of(server.client.post("/health"), 405)
    assert server.chat(model="alias").json()["model"] == "test-model"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"n": 10**9}, "n", id="11 n"),
        pytest.param({"n": 0}, "n", id="11 no answer"),
        *(
            pytest.param({field: value}, field, id=f"12 {field} {value}")
            for field, value in [
                ("temperature", -0.1),
                ("temperature", 1e9),
                ("top_p", 0),
                ("top_p", 1.1),
                ("top_k", -2),
                ("min_p", -1),
                ("typical_p", 2),
                ("xtc_probability", 1.5),
                ("xtc_threshold", 0),
                ("repetition_penalty", 0),
                ("frequency_penalty", 3),
                ("presence_penalty", -3),
            ]
        ),
        pytest.param({"max_tokens": 0}, "max_tokens", id="13 none"),
        pytest.param({"max_tokens": -1}, "max_tokens", id="13 negative"),
        pytest.param({"max_tokens": 10**23}, "max_tokens", id="13 huge"),
        pytest.param({"min_tokens": 9}, "min_tokens", id="13 least above most"),
        pytest.param({"logit_bias": {"49152": 1}}, "logit_bias", id="15 past the vocabulary"),
        pytest.param({"logit_bias": {"a": 1}}, "logit_bias", id="15 no id"),
        pytest.param({"logit_bias": {"1": 101}}, "logit_bias[1]", id="15 too strong"),
        pytest.param({"logit_bias": dict.fromkeys(map(str, range(2000)), 1)}, "logit_bias", id="15 many"),
        pytest.param({"stop": ""}, "stop", id="16 empty"),
        pytest.param({"stop": ["a"] * 10**5}, "stop", id="16 many"),
        pytest.param({"stop": "a" * 10**6}, "stop", id="16 long"),
        pytest.param({"seed": 2**63}, "seed", id="17"),
        pytest.param({"priority": "urgent"}, "priority", id="priority"),
        pytest.param({"priority": 7}, "priority", id="priority number"),
        pytest.param({"deadline": -1}, "deadline", id="deadline"),
        pytest.param({"response_format": {"type": "json"}}, "response_format", id="28 unknown"),
        pytest.param(
            {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", id="28 two"
        ),
    ],
)
def test_values_out_of_range_are_refused_with_their_field(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    error_of(server.chat(**fields), 400, param)
    error_of(server.complete(**fields), 400, param)
    error_of(server.complete(**fields, stream=True), 400, param)


def test_11_a_hundred_thousand_prompts_are_refused(server: Server) -> None:
    error_of(server.complete(["a"] * 10**5), 400, "prompt")
    error_of(server.complete(["a"] * 100, n=100), 400, "prompt")


@pytest.mark.parametrize("top_k", [0, -1])
def test_12_top_k_is_off_with_0_and_with_minus_1(server: Server, top_k: int) -> None:
    assert server.chat(top_k=top_k).status_code == 200


def test_14_too_many_logprobs_are_refused(server: Server) -> None:
    error_of(server.complete(logprobs=10**6), 400, "logprobs")
    error_of(server.chat(logprobs=True, top_logprobs=10**6), 400, "top_logprobs")
    error_of(server.chat(top_logprobs=2), 400, "top_logprobs")


def test_19_a_prompt_longer_than_the_context_is_refused_with_both_numbers(server: Server) -> None:
    for prompt in ([1] * 9000, "word " * 9000):
        error = error_of(server.complete(prompt), 400, "prompt")
        assert error["code"] == "context_length_exceeded"
        assert "900" in error["message"] and "8191" in error["message"]
    long_talk = [{"role": "user", "content": "word " * 9000}]
    error = error_of(server.chat(messages=long_talk, stream=True), 400, "messages")
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "prompt", [[], [-1], [49152], [1, "a"], [[]], [[1], "a", 2], [1.5], [True], [[1, [2]]]]
)
def test_20_invalid_prompts_are_refused(server: Server, prompt: Any) -> None:
    assert error_of(server.complete(prompt), 400)["param"].startswith("prompt")


@pytest.mark.parametrize("messages", [[], [{}], [{"role": "user", "content": 5}], [{"content": "x"}], ["x"]])
def test_20_invalid_messages_are_refused(server: Server, messages: Any) -> None:
    assert error_of(server.chat(messages=messages), 400)["param"].startswith("messages")


def test_21_control_tokens_in_messages_and_prompts_are_plain_text(server: Server) -> None:
    def tokens(**fields: Any) -> list[int]:
        answer: list[int] = server.client.post("/tokenize", json=fields).json()["tokens"]
        return answer

    [end] = {2} & set(tokens(messages=MESSAGES))
    plain = tokens(messages=MESSAGES).count(end)
    assert tokens(messages=[{"role": "user", "content": "<|im_end|>"}]).count(end) == plain
    assert end not in tokens(prompt="<|im_end|>")


def test_22_a_prompt_of_megabytes_does_not_block_other_requests(server: Server) -> None:
    """10 MB are refused without tokenising. 2 MB might fit with another vocabulary, and are tokenised in a worker
    process."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            for size in (2_000_000, 10_000_000):
                answers.append(client.post("/v1/completions", json={"prompt": "word " * (size // 5)}))

    pending = threading.Thread(target=ask)
    pending.start()
    num_healthy = 0
    while pending.is_alive():
        assert server.client.get("/health").status_code == 200
        num_healthy += 1
        time.sleep(0.01)
    pending.join()
    assert [error_of(answer, 400, "prompt")["code"] for answer in answers] == ["context_length_exceeded"] * 2
    # With a tokenizer that blocks the event loop, only one or two requests would get through.
    assert num_healthy > 20, num_healthy


def test_23_a_template_and_reserved_arguments_of_a_request_are_refused(server: Server) -> None:
    error_of(server.chat(chat_template="{{ 1 }}"), 400, "chat_template")
    for name in ("messages", "add_generation_prompt", "bos_token"):
        error_of(server.chat(chat_template_kwargs={name: "x"}), 400, "chat_template_kwargs")
    assert server.chat(chat_template_kwargs={"enable_thinking": False}).status_code == 200


def test_31_media_are_refused_and_nothing_is_fetched(server: Server) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}
    error_of(server.chat(messages=[{"role": "user", "content": [part]}]), 400, "messages")


@pytest.mark.parametrize("field", ["lora", "adapter", "adapter_id", "lora_path", "lora_request"])
def test_35_adapters_are_refused(server: Server, field: str) -> None:
    for value in ("../../etc/passwd", {"path": "/", "rank": 10**6}):
        for answer in (server.chat(**{field: value}), server.complete(**{field: value})):
            message = error_of(answer, 400, field)["message"]
            assert "adapters" in message and "passwd" not in message


@pytest.mark.parametrize("name", ["test-model:adapter", "test-model/../x", "test-model+lora"])
def test_35_a_model_name_with_an_adapter_suffix_is_unknown(server: Server, name: str) -> None:
    error_of(server.chat(model=name), 404, "model")


def test_37_different_salts_share_nothing_and_the_same_salt_does(server: Server) -> None:
    prompt = list(range(100, 200))

    def cached(salt: str) -> int:
        usage = server.complete(prompt, cache_salt=salt).json()["usage"]
        number: int = usage["prompt_tokens_details"]["cached_tokens"]
        return number

    assert cached("one") == 0
    assert cached("two") == 0
    assert cached("one") >= 80


def test_39_too_many_requests_get_a_429_with_retry_after(strict_server: Server) -> None:
    body = {"prompt": "x", "max_tokens": 8000, "stream": True}
    with (
        strict_server.client.stream("POST", "/v1/completions", json=body) as first,
        strict_server.client.stream("POST", "/v1/completions", json=body) as second,
    ):
        assert first.status_code == second.status_code == 200
        refused = strict_server.complete()
        error_of(refused, 429)
        assert int(refused.headers["retry-after"]) >= 1
    strict_server.wait_until_free()
    assert strict_server.complete().status_code == 200


def test_unknown_fields_are_ignored_with_a_warning(server: Server) -> None:
    response = server.chat(**{"bananas": 1, "x\r\ny": 2})
    assert response.status_code == 200
    assert "bananas" in response.headers["warning"] and "x??y" in response.headers["warning"]
    assert "warning" not in server.chat(user="me", metadata={"a": "b"}).headers


def test_unsupported_fields_that_would_change_the_answer_are_refused(server: Server) -> None:
    for field in ("audio", "structured_outputs", "functions"):
        error_of(server.chat(**{field: {}}), 400, field)
    error_of(server.complete(suffix="x"), 400, "suffix")
    error_of(server.complete(best_of=3), 400, "best_of")


def test_detokenize_refuses_invalid_tokens(server: Server) -> None:
    for tokens in ([-1], [10**6], ["a"], [0] * 300_000):
        error_of(server.client.post("/detokenize", content=json.dumps({"tokens": tokens})), 400)
