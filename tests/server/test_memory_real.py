"""A question over the documents of this repo, answered from the right one: the real embedding model and the real
default model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from memory_client import MemoryClient
from server_process import Server, running_server
from vector_models import embedder

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
PAGES = ("api-keys.md", "batches.md", "speculation.md", "ollama.md", "health.md")
QUESTIONS = {
    "How many requests may a key send in a minute?": "api-keys.md",
    "How do I run a file of requests in the capacity that clients leave?": "batches.md",
    "What are draft tokens good for?": "speculation.md",
    "Which port do programs written for Ollama expect?": "ollama.md",
    "How does a load balancer see that the engine is down?": "health.md",
}


@pytest.fixture(scope="module")
def real_memory(default_model_path: Path) -> Iterator[tuple[Server, str]]:
    options = {"checkpoint": str(default_model_path), "max_context": 4096}
    with running_server(
        default_model_path, backend="cpu", backend_options=options, vector_models=[embedder()]
    ) as server:
        client = MemoryClient(server)
        store = client.create(name="guide")
        for page in PAGES:
            client.attach(store, (GUIDE / page).read_bytes(), page, attributes={"page": page})
        counts = client.wait(store)
        assert counts["completed"] == len(PAGES)
        yield server, store


def test_questions_find_their_page(real_memory: tuple[Server, str]) -> None:
    server, store = real_memory
    client = MemoryClient(server)
    num_by_meaning = 0
    for question, page in QUESTIONS.items():
        found = client.search(store, question, max_num_results=3)
        assert found[0]["filename"] == page, (question, [each["filename"] for each in found])
        by_meaning = {"hybrid_search": {"embedding_weight": 1, "text_weight": 0}}
        found = client.search(store, question, max_num_results=3, ranking_options=by_meaning)
        num_by_meaning += page in [each["filename"] for each in found]
    assert num_by_meaning >= len(QUESTIONS) - 1


def test_an_answer_cites_the_page_that_it_was_made_from(real_memory: tuple[Server, str]) -> None:
    """Retrieval reaches the answer: it has a number that only the right page has. The default model is small and writes no
    `[1]`, so the citation is the one for such answers, of the best passage. Citations by number are tested in
    tests/unit/test_memory_search.py."""
    server, store = real_memory
    question = "Which port do programs written for Ollama expect?"
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(
            input=question,
            tools=[{"type": "file_search", "vector_store_ids": [store], "max_num_results": 2}],
            temperature=0,
            max_output_tokens=60,
        )
    call, message = response.output
    assert call.type == "file_search_call" and call.queries == [question]
    assert message.type == "message" and message.content[0].type == "output_text"
    names = [each.filename for each in message.content[0].annotations if each.type == "file_citation"]
    assert names and names[0] == "ollama.md"
    assert "11434" in response.output_text
