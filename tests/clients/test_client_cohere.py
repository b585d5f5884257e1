"""cohere: rerank with both versions of its client."""

from __future__ import annotations

from typing import Any

import cohere
import pytest
from server_process import Server
from vector_models import RERANKER

QUERY = "Who wrote Faust?"
DOCUMENTS = ["Bees make honey.", "Goethe wrote Faust.", "Paris is in France."]


@pytest.fixture(params=[cohere.Client, cohere.ClientV2])
def client(served: Server, request: pytest.FixtureRequest) -> Any:
    return request.param(base_url=served.url, api_key="secret")


def test_documents_are_returned_by_score(client: Any) -> None:
    found = client.rerank(model=RERANKER, query=QUERY, documents=DOCUMENTS, top_n=2)
    scores = [one.relevance_score for one in found.results]
    assert len(scores) == 2 and scores == sorted(scores, reverse=True) and found.id
    whole = client.rerank(model="rerank-v3.5", query=QUERY, documents=DOCUMENTS).results
    assert sorted(one.index for one in whole) == [0, 1, 2]
    assert [(one.index, one.relevance_score) for one in whole[:2]] == [
        (one.index, one.relevance_score) for one in found.results
    ]


def test_a_wrong_request_raises_with_the_message_of_the_server(client: Any) -> None:
    with pytest.raises(cohere.BadRequestError) as caught:
        client.rerank(model=RERANKER, query="", documents=DOCUMENTS)
    assert "query is empty" in str(caught.value)
    with pytest.raises(cohere.NotFoundError, match="no model 'nope'"):
        client.rerank(model="nope", query=QUERY, documents=DOCUMENTS)
