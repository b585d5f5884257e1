"""The cost of one small body of the routes for vectors, scores and vector stores: see test_amplification.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcess
from test_amplification import check_costs, with_server
from vector_models import embedder_path, noop_embedder, noop_reranker

TEXTS = [
    "a text of a hundred bytes, which is about as long as a short sentence in a page of a manual is. " + "."
] * 2048
IDS = [[5, 6, 7] * 10] * 2048
QUERY = "why? " * 80_000
DEEP: dict[str, Any] = {"type": "eq", "key": "a", "value": 1}
for _ in range(6):
    DEEP = {"type": "and", "filters": [DEEP] * 4}
OF_VECTORS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]]]] = {
    "/v1/embeddings": (
        {"input": "x"},
        {"texts": {"input": TEXTS}, "ids": {"input": IDS}, "one text": {"input": QUERY, "truncate": True}},
    ),
    "/api/embed": ({"input": "x"}, {"texts": {"input": TEXTS}, "one text": {"input": QUERY}}),
    "/v1/rerank": (
        {"query": "x", "documents": ["y"]},
        {
            "documents": {"documents": TEXTS},
            "objects": {"documents": [{"text": one, "more": [1] * 10} for one in TEXTS]},
            "a long query": {"documents": ["y"] * 2048, "query": QUERY},
            "the same documents back": {"documents": TEXTS, "return_documents": True, "top_n": 2000},
        },
    ),
    "/v1/score": (
        {"text_1": "x", "text_2": ["y"]},
        {
            "texts": {"text_2": TEXTS},
            "a long query": {"text_1": QUERY, "text_2": ["y"] * 2048},
            "pairs": {"text_1": TEXTS, "text_2": TEXTS},
        },
    ),
    "/v1/vector_stores": (
        {},
        {
            "files": {"file_ids": ["FILE"] * 500},
            "too many files": {"file_ids": ["FILE"] * 20_000},
            "metadata": {"metadata": {f"{n}": "x" * 100 for n in range(9000)}},
        },
    ),
    "/v1/vector_stores/STORE/search": (
        {"query": "x"},
        {
            "queries": {"query": ["what? " * 100] * 16},
            "too many queries": {"query": ["what?"] * 100_000},
            "a long query": {"query": "what? " * 80_000},
            "filters": {"query": "x", "filters": DEEP},
            "values": {
                "query": "x",
                "filters": {"type": "in", "key": "a", "value": [str(n) for n in range(100_000)]},
            },
        },
    ),
    "/v1/vector_stores/STORE/file_batches": (
        {"file_ids": ["FILE"]},
        {
            "files": {"file_ids": ["FILE"] * 500},
            "objects": {
                "file_ids": None,
                "files": [
                    {"file_id": "FILE", "attributes": {f"{n}": "x" * 100 for n in range(16)}}
                    for _ in range(500)
                ],
            },
            "too many": {"file_ids": ["FILE"] * 25_000},
        },
    ),
}


@pytest.mark.parametrize("path", OF_VECTORS)
def test_the_cost_of_each_list_for_vectors_and_searches_is_bounded_by_its_bytes(
    default_model_path: Path, path: str
) -> None:
    base, lists = OF_VECTORS[path]

    async def work(server: InProcess) -> None:
        form = (
            b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nassistants\r\n'
            b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.txt"\r\n\r\nbees\r\n--b--\r\n'
        )
        kind = {b"content-type": b"multipart/form-data; boundary=b"}
        file = json.loads((await server.send("/v1/files", form, more_headers=kind)).body)["id"]
        store = json.loads((await server.send("/v1/vector_stores", b"{}")).body)["id"]
        given = json.loads(json.dumps([base, lists]).replace("FILE", file))
        await check_costs(server, path.replace("STORE", store), *given)

    models = [noop_embedder(embedder_path()), noop_reranker(embedder_path())]
    with_server(default_model_path, work, vector_models=models)
