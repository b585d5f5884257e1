"""More of the list of forty: nulls in completions, invalid biases, media that must not be fetched."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from server_process import Server
from test_bad_inputs import COMPLETION_FIELDS, error_of


@pytest.mark.parametrize("field", [field for field in COMPLETION_FIELDS if field != "prompt"])
def test_09_null_in_a_completion_is_the_default(server: Server, field: str) -> None:
    fields = {"prompt": "x", "max_tokens": 2, field: None}
    assert server.client.post("/v1/completions", json=fields).status_code == 200


def test_13_num_predict_of_ollama_is_accepted(server: Server) -> None:
    assert server.complete(num_predict=-1).status_code == 200


@pytest.mark.parametrize(
    "bias",
    [
        '{"1": 1e400}',
        '{"1": -1e400}',
        '{"1": Infinity}',
        '{"-1": 1}',
        '{"1.5": 1}',
        '{"١": 1}',
        json.dumps(dict.fromkeys(map(str, range(10**6)), 1)),
    ],
    ids=lambda bias: bias[:16],
)
def test_15_invalid_and_unbounded_biases_are_refused(server: Server, bias: str) -> None:
    body = f'{{"prompt": "x", "max_tokens": 2, "logit_bias": {bias}}}'
    error_of(server.client.post("/v1/completions", content=body.encode()), 400)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "URL"}},
        {"type": "image_url", "image_url": {"url": "file:///x.png"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "URL"}},
        {"type": "file", "file": {"file_id": "URL"}},
    ],
    ids=lambda part: part["type"],
)
def test_31_the_server_never_connects_to_the_address_of_media(server: Server, part: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as waiting:
        url = f"http://127.0.0.1:{waiting.getsockname()[1]}/x.png"
        sent = json.loads(json.dumps(part).replace("URL", url)) if "URL" in json.dumps(part) else part
        answer = server.chat(messages=[{"role": "user", "content": [sent]}])
        assert error_of(answer, 400)["param"].startswith("messages")
        assert "passwd" not in answer.text
        waiting.settimeout(0.05)
        with pytest.raises(TimeoutError):
            waiting.accept()


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "schema": None}},
        {"stream": True, "stream_options": {"include_usage": None}},
    ],
)
def test_09_null_inside_an_object_is_the_default_too(server: Server, fields: dict[str, Any]) -> None:
    response = server.chat(**fields)
    assert response.status_code == 200, response.text
