"""CORS: requests from web pages that an operator allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server_process import Server, api_key, running_server

PAGE = "https://page.example"
ORIGIN = {"Origin": PAGE}


@pytest.fixture(scope="module")
def pages(default_model_path: Path) -> Iterator[Server]:
    keys = [api_key("secret", requests_per_minute=1000)]
    with running_server(default_model_path, allowed_origins=[PAGE], api_keys=keys) as server:
        yield server


def test_a_cors_preflight_returns_what_the_page_may_send(pages: Server) -> None:
    preflight_headers = {
        **ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    preflight = pages.client.options("/v1/chat/completions", headers=preflight_headers)
    assert preflight.status_code == 200 and preflight.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    other = pages.client.options(
        "/v1/chat/completions", headers={**preflight_headers, "Origin": "https://other.example"}
    )
    assert other.status_code == 403 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("stream", [True, False])
def test_an_allowed_page_can_read_the_response_and_its_headers(pages: Server, stream: bool) -> None:
    headers = {**ORIGIN, "Authorization": "Bearer secret"}
    body = {"prompt": "Hello", "max_tokens": 2, "stream": stream}
    answer = pages.client.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == PAGE
    exposed = {name.strip().lower() for name in answer.headers["access-control-expose-headers"].split(",")}
    assert {"x-request-id", "retry-after", "warning", "x-ratelimit-remaining-requests"} <= exposed


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer secret", "Content-Encoding": "gzip"}, 400),
        ({"Authorization": "Bearer secret"}, 404),
    ],
)
def test_an_allowed_page_can_read_errors(pages: Server, headers: dict[str, str], status: int) -> None:
    """Without the CORS header a browser only reports a network error to the page."""
    body = {"prompt": "Hello", "model": "nothing"}
    error = pages.client.post("/v1/completions", json=body, headers={**ORIGIN, **headers})
    assert error.status_code == status and error.headers["access-control-allow-origin"] == PAGE
