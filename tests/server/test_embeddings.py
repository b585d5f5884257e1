"""Vectors and scores over HTTP: a real server process with a model that generates (noop), the real MiniLM and a small
random reranker."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from server_process import MODEL, NOOP, Server, api_key, running_server, wait_for
from vector_models import (
    DIMENSIONS,
    EMBEDDER,
    MAX_TOKENS,
    RERANKER,
    embedder,
    embedder_path,
    embedder_server,
    engines,
    noop_embedder,
    reranker,
)

from weft.loading.checkpoint import open_checkpoint
from weft.loading.embedding_files import embedding_spec
from weft.text.embedding_text import EmbeddingText

TEXTS = [
    "A cat sits on the mat.",
    "The engine computes vectors.",
    "mat",
    "Ein Satz auf Deutsch, mit Umlauten: äöü.",
]
EMBEDDINGS, RERANK, SCORE = "/v1/embeddings", "/v1/rerank", "/v1/score"
GENERATING = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "Hi"},
    "/api/chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "/api/generate": {"prompt": "Hi"},
}


@pytest.fixture(scope="module")
def vector_server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    models = [embedder(), reranker(tmp_path_factory.mktemp("model") / RERANKER)]
    with running_server(default_model_path, vector_models=models) as server:
        yield server


@pytest.fixture
def server(vector_server: Server) -> Iterator[Server]:
    """After each test the server must be healthy and hold nothing."""
    yield vector_server
    assert vector_server.client.get("/health").json()["models"] == {
        MODEL: "ready",
        EMBEDDER: "ready",
        RERANKER: "ready",
    }
    vector_server.wait_until_free()


def vectors_of(server: Server, texts: Any, **fields: Any) -> np.ndarray:
    response = server.client.post(EMBEDDINGS, json={"input": texts, **fields})
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [one["index"] for one in data] == list(range(len(data)))
    return np.array([one["embedding"] for one in data], np.float64).astype(np.float32)


def refused(server: Server, path: str, status: int, *words: str, **body: Any) -> dict[str, Any]:
    response = server.client.post(path, json=body)
    assert response.status_code == status, response.text
    for word in words:
        assert word in response.text, response.text
    content: dict[str, Any] = response.json()
    return content


# ---------------------------------------------------------------------- vectors


def test_a_text_gets_the_same_bits_alone_and_among_hundreds(server: Server) -> None:
    texts = [f"{TEXTS[index % 4]} {'word ' * (index % 50)}{index}" for index in range(300)]
    together = vectors_of(server, texts)
    assert together.shape == (300, DIMENSIONS)
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    for index in (0, 49, 299):
        assert vectors_of(server, texts[index]).tobytes() == together[index].tobytes()


def test_similar_texts_have_similar_vectors(server: Server) -> None:
    query, near, far = vectors_of(
        server, ["How do I cook rice?", "Boil rice in water.", "The stock market fell."]
    )
    assert query @ near > 0.4 > query @ far


def test_base64_has_the_same_numbers_as_float(server: Server) -> None:
    response = server.client.post(EMBEDDINGS, json={"input": TEXTS, "encoding_format": "base64"})
    decoded = [base64.b64decode(one["embedding"]) for one in response.json()["data"]]
    assert b"".join(decoded) == vectors_of(server, TEXTS).tobytes()


def test_dimensions_cut_each_vector_and_scale_it_to_length_one(server: Server) -> None:
    whole, cut = vectors_of(server, TEXTS), vectors_of(server, TEXTS, dimensions=100)
    first = whole[:, :100]
    assert np.allclose(cut, first / np.linalg.norm(first, axis=1, keepdims=True), atol=1e-6)
    assert vectors_of(server, TEXTS, dimensions=DIMENSIONS).tobytes() == whole.tobytes()


def test_token_ids_get_the_vector_of_their_text(server: Server) -> None:
    checkpoint = open_checkpoint(embedder_path())
    spec = embedding_spec(checkpoint)
    assert spec is not None
    tokens = EmbeddingText(checkpoint, spec).tokens_of(TEXTS)
    assert vectors_of(server, tokens).tobytes() == vectors_of(server, TEXTS).tobytes()
    assert vectors_of(server, tokens[0]).tobytes() == vectors_of(server, TEXTS[0]).tobytes()


def test_usage_counts_the_tokens_that_were_computed(server: Server) -> None:
    before = server.metric("prompt_tokens_total")
    usage = server.client.post(EMBEDDINGS, json={"input": ["mat", "cat"], "user": "me"}).json()["usage"]
    assert usage == {"prompt_tokens": 6, "total_tokens": 6}
    assert server.metric("prompt_tokens_total") - before == 6


def test_a_long_text_is_refused_with_both_numbers_or_cut(server: Server) -> None:
    long = "word " * 1000
    error = refused(server, EMBEDDINGS, 400, "1002", str(MAX_TOKENS), input=["short", long])["error"]
    assert error["param"] == "input[1]" and error["code"] == "context_length_exceeded"
    cut = vectors_of(server, long, truncate=True)
    assert cut.tobytes() == vectors_of(server, "word " * (MAX_TOKENS - 2)).tobytes()


def test_a_text_of_ten_megabytes_is_refused_or_cut_while_others_are_answered(server: Server) -> None:
    large = "lorem ipsum " * 850_000
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(server.client.post, EMBEDDINGS, json={"input": large}, timeout=300)
        cut = threads.submit(
            server.client.post, EMBEDDINGS, json={"input": large, "truncate": True}, timeout=300
        )
        number = 0
        while not (waiting.done() and cut.done()):
            assert server.client.get("/health").status_code == 200
            assert vectors_of(server, f"text {number}").shape == (1, DIMENSIONS)
            number += 1
        assert waiting.result().status_code == 400
        assert waiting.result().json()["error"]["code"] == "context_length_exceeded"
        assert cut.result().json()["usage"]["prompt_tokens"] == MAX_TOKENS


def test_the_openai_package_gets_vectors(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    found = client.embeddings.create(model="text-embedding-3-small", input=TEXTS)  # asks for base64
    assert found.model == EMBEDDER and len(found.data) == len(TEXTS)
    expected = vectors_of(server, TEXTS)
    assert np.array_equal(np.array([one.embedding for one in found.data], np.float32), expected)
    assert len(client.embeddings.create(model=EMBEDDER, input="a", dimensions=7).data[0].embedding) == 7
    with pytest.raises(openai.BadRequestError, match=r"dimensions is 10000.*384"):
        client.embeddings.create(model=EMBEDDER, input="a", dimensions=10_000)
    with pytest.raises(openai.NotFoundError, match="no model 'nope'"):
        client.embeddings.create(model="nope", input="a")


def test_the_ollama_package_gets_vectors(server: Server) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(server.url)
    expected = vectors_of(server, TEXTS)
    found = client.embed(EMBEDDER, TEXTS)
    assert np.array_equal(np.array(found.embeddings, np.float32), expected)
    assert found.total_duration > 0 and found.prompt_eval_count > 0
    assert len(client.embed(EMBEDDER, "a", dimensions=5).embeddings[0]) == 5
    assert np.array_equal(np.array(client.embeddings(EMBEDDER, TEXTS[0]).embedding, np.float32), expected[0])
    assert client.embed(EMBEDDER, "").embeddings == []
    assert client.embed(EMBEDDER, "word " * 1000).prompt_eval_count == MAX_TOKENS
    with pytest.raises(ollama.ResponseError, match="1002"):
        client.embed(EMBEDDER, "word " * 1000, truncate=False)
    assert EMBEDDER in [one.model for one in client.list().models]
    assert client.show(EMBEDDER).capabilities == ["embedding"]


# ---------------------------------------------------------------------- scores

DOCUMENTS = ["Bees make honey.", {"text": "Goethe wrote Faust."}, "Paris is in France.", "mat " * 2000]


def test_reranking_sorts_documents_by_score(server: Server) -> None:
    body = {"query": "Who wrote Faust?", "documents": DOCUMENTS, "return_documents": True}
    found = server.client.post(RERANK, json=body).json()
    results = found["results"]
    scores = [one["relevance_score"] for one in results]
    assert scores == sorted(scores, reverse=True) and all(0 < score < 1 for score in scores)
    assert sorted(one["index"] for one in results) == [0, 1, 2, 3]
    assert next(one for one in results if one["index"] == 1)["document"] == {"text": "Goethe wrote Faust."}
    assert found["model"] == RERANKER and found["usage"]["total_tokens"] > 2 * MAX_TOKENS
    for path in ("/v2/rerank", "/rerank"):
        top = server.client.post(path, json={**body, "top_n": 2, "return_documents": False}).json()["results"]
        assert [(one["index"], one["relevance_score"]) for one in top] == [
            (one["index"], one["relevance_score"]) for one in results[:2]
        ]
        assert all("document" not in one for one in top)
    pairs = {"text_1": body["query"], "text_2": [DOCUMENTS[0], "Goethe wrote Faust.", *DOCUMENTS[2:]]}
    by_index = {one["index"]: one["relevance_score"] for one in results}
    for path in (SCORE, "/score"):
        data = server.client.post(path, json=pairs).json()["data"]
        assert [one["score"] for one in data] == [by_index[index] for index in range(4)]


def test_pairs_with_queries_of_their_own_are_scored_like_single_pairs(server: Server) -> None:
    queries, texts = ["first query", "second " * 3000], ["first text", "second text"]
    data = server.client.post(SCORE, json={"text_1": queries, "text_2": texts}).json()["data"]
    for query, text, one in zip(queries, texts, data, strict=True):
        alone = server.client.post(SCORE, json={"text_1": query, "text_2": text}).json()["data"]
        assert alone[0]["score"] == one["score"]


# ---------------------------------------------------------------------- refusals

WRONG: list[tuple[str, dict[str, Any], str]] = [
    (EMBEDDINGS, {"input": ""}, "input is empty"),
    (EMBEDDINGS, {"input": []}, "1 to 2048"),
    (EMBEDDINGS, {"input": ["a", ""]}, "input[1] is empty"),
    (EMBEDDINGS, {}, "input"),
    (EMBEDDINGS, {"input": None}, "input"),
    (EMBEDDINGS, {"input": 5}, "input"),
    (EMBEDDINGS, {"input": {"a": 1}}, "input"),
    (EMBEDDINGS, {"input": ["a"] * 2049}, "2049"),
    (EMBEDDINGS, {"input": [[1]] * 2049}, "2049"),
    (EMBEDDINGS, {"input": [1] * (MAX_TOKENS + 1)}, f"{MAX_TOKENS + 1}"),
    (EMBEDDINGS, {"input": [[1, 2], []]}, "input[1] is empty"),
    (EMBEDDINGS, {"input": [-1]}, "-1"),
    (EMBEDDINGS, {"input": [10**9]}, "1000000000"),
    (EMBEDDINGS, {"input": [10**30]}, "input"),
    (EMBEDDINGS, {"input": [1.5]}, "input"),
    (EMBEDDINGS, {"input": [True]}, "input"),
    (EMBEDDINGS, {"input": ["a", 1]}, "one kind"),
    (EMBEDDINGS, {"input": "a", "dimensions": 0}, "1 to 384"),
    (EMBEDDINGS, {"input": "a", "dimensions": 385}, "1 to 384"),
    (EMBEDDINGS, {"input": "a", "dimensions": "many"}, "dimensions"),
    (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
    (EMBEDDINGS, {"input": "a", "input_type": "poem"}, "search_query"),
    (EMBEDDINGS, {"input": "\ud800"}, "JSON"),
    (EMBEDDINGS, {"input": "a", "deadline": "soon"}, "deadline"),
    (RERANK, {"query": "", "documents": ["a"]}, "query is empty"),
    (RERANK, {"query": "a", "documents": []}, "1 to 2048"),
    (RERANK, {"query": "a", "documents": ["a"] * 2049}, "2049"),
    (RERANK, {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
    (RERANK, {"query": "a", "documents": [{"image": "a"}]}, "documents[0]"),
    (RERANK, {"query": "a", "documents": [{"text": 5}]}, "documents[0]"),
    (RERANK, {"documents": ["a"]}, "query"),
    (RERANK, {"query": "a"}, "documents"),
    (RERANK, {"query": "a", "documents": [7]}, "documents"),
    (SCORE, {"text_1": "a", "text_2": []}, "text_2"),
    (SCORE, {"text_1": "a", "text_2": ["b"] * 2049}, "2049"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "2 entries"),
    (SCORE, {"text_1": [], "text_2": ["c"]}, "text_1"),
    (SCORE, {"text_1": ["a", ""], "text_2": ["c", "d"]}, "text_1[1]"),
    ("/api/embed", {"input": ["a", ""]}, "input[1] is empty"),
    ("/api/embed", {"input": ["a"] * 2049}, "2049"),
    ("/api/embed", {"input": "a", "dimensions": 1000}, "dimensions"),
    ("/api/embed", {"input": 5}, "input"),
    ("/api/embeddings", {"prompt": 5}, "prompt"),
]


@pytest.mark.parametrize(("path", "body", "words"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_body_gets_a_400_that_says_what_is_wrong(
    server: Server, path: str, body: dict[str, Any], words: str
) -> None:
    response = server.client.post(
        path, content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert response.status_code == 400, response.text
    error = response.json()
    message = error["error"] if path.startswith("/api/") else error["error"]["message"]
    assert words in message
    if path == RERANK:
        assert error["message"] == message, "the form of Cohere's API"


def test_numbers_that_json_does_not_know_are_refused(server: Server) -> None:
    for content in (
        '{"input": [NaN]}',
        '{"input": [1e400]}',
        '{"input": "a", "dimensions": Infinity}',
        "[" * 100_000,
    ):
        response = server.client.post(
            EMBEDDINGS, content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, response.text


def test_a_model_of_another_kind_is_named_with_its_route(server: Server) -> None:
    for path, body in GENERATING.items():
        refused(server, path, 400, EMBEDDER, "makes embeddings", EMBEDDINGS, model=EMBEDDER, **body)
    refused(server, EMBEDDINGS, 400, MODEL, "generates text", "/v1/chat/completions", model=MODEL, input="a")
    refused(server, EMBEDDINGS, 400, RERANKER, "scores documents", RERANK, model=RERANKER, input="a")
    refused(server, RERANK, 400, EMBEDDER, "embeddings", model=EMBEDDER, query="a", documents=["b"])
    error = refused(server, EMBEDDINGS, 404, "nope", MODEL, EMBEDDER, RERANKER, model="nope", input="a")
    assert error["error"]["code"] == "model_not_found"


def test_all_models_are_listed_with_what_they_do(server: Server) -> None:
    listed = {one["id"]: one for one in server.client.get("/v1/models").json()["data"]}
    assert list(listed) == [MODEL, EMBEDDER, RERANKER]
    assert "completion" in listed[MODEL]["capabilities"]
    assert listed[EMBEDDER]["capabilities"] == ["embedding"]
    assert listed[EMBEDDER]["dimensions"] == DIMENSIONS and listed[EMBEDDER]["max_model_len"] == MAX_TOKENS
    assert listed[RERANKER]["capabilities"] == ["rerank"]
    assert server.client.get(f"/v1/models/{EMBEDDER}").json() == listed[EMBEDDER]
    in_other_form = server.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert [one["id"] for one in in_other_form["data"]] == list(listed)


def test_a_server_without_such_models_says_what_to_set(default_model_path: Path) -> None:
    with running_server(default_model_path) as server:
        refused(server, EMBEDDINGS, 400, "--embedder default", input="a")
        refused(server, EMBEDDINGS, 400, "--embedder default", input="a", model="text-embedding-3-small")
        refused(server, RERANK, 400, "--reranker", query="a", documents=["b"])
        refused(server, SCORE, 400, "--reranker", text_1="a", text_2="b")
        refused(server, "/api/embed", 400, "--embedder", input="a", model="x" if False else MODEL)
    with running_server(default_model_path, vector_models=[noop_embedder(embedder_path())]) as server:
        refused(server, RERANK, 400, "--reranker", "Embeddings are no substitute", query="a", documents=["b"])


# ---------------------------------------------------------------------- a server without a model that generates


def test_a_server_of_an_embedding_model_refuses_to_generate_in_every_api() -> None:
    with embedder_server() as server:
        assert vectors_of(server, TEXTS).shape == (4, DIMENSIONS)
        for path, body in GENERATING.items():
            refused(server, path, 400, EMBEDDER, "makes embeddings", **body)
        assert [one["id"] for one in server.client.get("/v1/models").json()["data"]] == [EMBEDDER]
        assert server.client.get("/ready").json() == {"status": "ready"}
        tokens = server.client.post("/tokenize", json={"prompt": "mat"}).json()["tokens"]
        assert vectors_of(server, tokens).tobytes() == vectors_of(server, "mat").tobytes()
        assert server.metric("vector_inputs_total") == 6


# ---------------------------------------------------------------------- keys, fairness, disconnects


def test_tokens_are_charged_to_the_key_and_limited(default_model_path: Path) -> None:
    keys = [api_key("small", tokens_per_minute=10), api_key("other"), api_key("boss", admin=True)]
    with running_server(default_model_path, api_keys=keys, vector_models=[embedder()]) as server:

        def ask(key: str, texts: Any) -> Any:
            return server.client.post(
                EMBEDDINGS, json={"input": texts}, headers={"Authorization": f"Bearer {key}"}
            )

        assert server.client.post(EMBEDDINGS, json={"input": "a"}).status_code == 401
        first = ask("small", ["mat", "cat"])
        assert first.status_code == 200 and first.headers["x-ratelimit-remaining-tokens"] == "4"
        second = ask("small", ["mat", "cat"])
        assert second.status_code == 429 and second.json()["error"]["code"] == "rate_limit_exceeded"
        assert ask("small", "").status_code == 400, "a refused request costs nothing"
        assert ask("other", ["mat"] * 100).status_code == 200
        text = server.client.get("/metrics", headers={"Authorization": "Bearer boss"}).text
        used = {line for line in text.splitlines() if line.startswith("weft:key_tokens_total")}
        assert any('key="small"' in line and line.endswith(" 6.0") for line in used), used
        assert any('key="other"' in line and line.endswith(" 300.0") for line in used), used


def test_a_request_with_one_text_overtakes_one_with_thousands(default_model_path: Path) -> None:
    """The large request takes at least 64 steps, the small one a few."""
    model = noop_embedder(embedder_path(), max_tokens=64, seconds_per_step=0.05)
    with (
        running_server(default_model_path, vector_models=[model]) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        large = threads.submit(
            server.client.post, EMBEDDINGS, json={"input": ["word " * 60] * 2048}, timeout=300
        )
        wait_for(lambda: server.metric("num_requests_running") > 0)
        for number in range(3):
            assert vectors_of(server, f"small {number}").shape == (1, 8)
        assert not large.done()
        assert len(large.result().json()["data"]) == 2048


def test_a_client_that_leaves_frees_the_engine(default_model_path: Path) -> None:
    model = noop_embedder(embedder_path(), seconds_per_step=0.05)

    with running_server(default_model_path, vector_models=[model]) as server:
        import httpx

        with pytest.raises(httpx.ReadTimeout):
            server.client.post(EMBEDDINGS, json={"input": ["word " * 60] * 2048}, timeout=1)
        server.wait_until_free()
        assert vectors_of(server, "mat").shape == (1, 8)


def test_a_deadline_ends_a_request(default_model_path: Path) -> None:
    model = noop_embedder(embedder_path(), seconds_per_step=0.05)
    with running_server(default_model_path, vector_models=[model]) as server:
        texts = ["word " * 60] * 2048
        error = refused(server, EMBEDDINGS, 504, "deadline", input=texts, deadline=0.1)["error"]
        assert error["code"] == "deadline_exceeded"
        server.wait_until_free()


def test_a_large_response_counts_against_the_budget_for_answers(default_model_path: Path) -> None:
    model = noop_embedder(embedder_path(), dimensions=512)
    with running_server(default_model_path, vector_models=[model], max_answer_bytes=1 << 20) as server:
        refused(server, EMBEDDINGS, 413, "max_answer_bytes", input=["a"] * 2048)
        assert vectors_of(server, ["a"] * 16).shape == (16, 512)


# ---------------------------------------------------------------------- crashes


def test_a_killed_embedder_leaves_chats_alone_and_comes_back(default_model_path: Path) -> None:
    options = {**NOOP, "seconds_per_step": 0.01}
    model = noop_embedder(embedder_path(), seconds_per_step=0.05)
    with (
        running_server(default_model_path, vector_models=[model], backend_options=options) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        chat, embed = engines(server)
        large = threads.submit(
            server.client.post, EMBEDDINGS, json={"input": ["word " * 60] * 2048}, timeout=300
        )
        with server.client.stream(
            "POST",
            "/v1/completions",
            json={"prompt": "a", "max_tokens": 300, "stream": True, "ignore_eos": True},
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            wait_for(lambda: server.metric("num_requests_running") > 1)
            kill(embed)
            assert large.result().status_code == 503
            assert large.result().json()["error"]["code"] == "engine_died"
            assert server.client.get("/health").status_code == 200
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and not any('"error"' in line for line in rest)

        def works() -> bool:
            response = server.client.post(EMBEDDINGS, json={"input": "mat"})
            assert response.status_code in (200, 503), response.text
            assert response.status_code == 200 or "retry-after" in response.headers
            return response.status_code == 200

        wait_for(works)
        assert engines(server)[0] == chat, "the engine of the chat did not restart"
        assert server.metric("engine_restarts_total") == 1


def test_a_killed_chat_engine_leaves_embeddings_alone(default_model_path: Path) -> None:
    with running_server(default_model_path, vector_models=[noop_embedder(embedder_path())]) as server:
        kill(engines(server)[0])
        wait_for(lambda: server.client.get("/health").status_code == 503)
        assert vectors_of(server, "mat").shape == (1, 8)
        wait_for(lambda: server.client.get("/health").status_code == 200)


def test_vectors_in_flight_are_complete_when_the_server_drains(default_model_path: Path) -> None:
    model = noop_embedder(embedder_path(), seconds_per_step=0.02)
    with (
        running_server(default_model_path, vector_models=[model]) as server,
        ThreadPoolExecutor(1) as threads,
    ):
        large = threads.submit(
            server.client.post, EMBEDDINGS, json={"input": ["word " * 60] * 500}, timeout=300
        )
        wait_for(lambda: server.metric("num_requests_running") > 0)
        server.process.terminate()
        assert len(large.result().json()["data"]) == 500
        assert server.process.wait(60) == 0


def kill(pid: int) -> None:
    import os
    import signal

    os.kill(pid, signal.SIGKILL)


def test_a_batch_makes_vectors_of_its_lines(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    lines = [
        {"custom_id": str(index), "method": "POST", "url": EMBEDDINGS, "body": {"input": text}}
        for index, text in enumerate([*TEXTS, ""])
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=EMBEDDINGS, completion_window="24h")
    wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
    ended = client.batches.retrieve(batch.id)
    assert ended.request_counts is not None and ended.request_counts.failed == 1
    assert ended.output_file_id is not None
    found = {
        one["custom_id"]: one["response"]["body"]["data"][0]["embedding"]
        for one in map(json.loads, client.files.content(ended.output_file_id).text.splitlines())
    }
    for index, text in enumerate(TEXTS):
        assert np.allclose(found[str(index)], vectors_of(server, text)[0], atol=1e-6)
