"""The memory through clients: LangChain's file search, and its retrieval chains: over passages that the server finds, and
over those that LangChain finds with vectors of the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import langchain_openai
import openai
import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from server_process import MODEL, running_server

from weft.loading.default_model import DEFAULT_EMBEDDER_NAME
from weft.loading.pull import pull

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
PAGES = ("ollama.md", "health.md")
QUESTION = "Which port do programs written for Ollama expect?"


def embedder() -> dict[str, Any]:
    path = str(pull(DEFAULT_EMBEDDER_NAME))
    return {
        "spec": {"kind": "embed", "pooling": "mean", "dimensions": 384, "max_tokens": 256},
        "path": path,
        "names": [DEFAULT_EMBEDDER_NAME],
        "backend": "embedder",
        "backend_options": {"checkpoint": path, "threads": 2},
    }


@pytest.fixture(scope="module")
def memory(default_model_path: Path) -> Iterator[tuple[openai.OpenAI, str, str]]:
    options = {"checkpoint": str(default_model_path), "max_context": 4096}
    with (
        running_server(
            default_model_path, backend="cpu", backend_options=options, vector_models=[embedder()]
        ) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client,
    ):
        store = client.vector_stores.create(name="guide")
        files = [(page, (GUIDE / page).read_bytes()) for page in PAGES]
        batch = client.vector_stores.file_batches.upload_and_poll(store.id, files=files)
        assert batch.file_counts.completed == len(PAGES)
        yield client, store.id, f"{server.url}/v1"


def chat(base_url: str, **more: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        model=MODEL, base_url=base_url, api_key="secret", temperature=0, max_tokens=60, max_retries=0, **more
    )


def test_langchain_runs_the_file_search_of_the_server_and_gets_its_citations(memory: Any) -> None:
    _, store, base_url = memory
    tool = {"type": "file_search", "vector_store_ids": [store], "max_num_results": 2}
    answer = chat(base_url, use_responses_api=True).bind_tools([tool]).invoke(QUESTION)
    [text] = [block for block in answer.content if block["type"] == "text"]
    assert "11434" in text["text"]
    names = [each.get("filename") or each.get("title") or each.get("source") for each in text["annotations"]]
    assert "ollama.md" in str(names or text["annotations"])


def test_a_retrieval_chain_of_langchain_answers_from_the_passages(memory: Any) -> None:
    client, store, base_url = memory

    def retrieve(question: str) -> str:
        found = client.vector_stores.search(store, query=question, max_num_results=2).data
        assert found[0].filename == "ollama.md"
        return "\n\n".join(one.content[0].text for one in found)

    assert "11434" in chain(RunnableLambda(retrieve), base_url).invoke(QUESTION)


def test_a_retriever_of_langchain_over_vectors_of_the_server_finds_the_right_passage(memory: Any) -> None:
    _, _, base_url = memory
    embeddings = langchain_openai.OpenAIEmbeddings(
        model=DEFAULT_EMBEDDER_NAME,
        base_url=base_url,
        api_key="secret",  # type: ignore[arg-type]
        check_embedding_ctx_length=False,
    )
    passages = [
        (page, line[:500])
        for page in PAGES
        for line in (GUIDE / page).read_text("utf-8").splitlines()
        if line.strip()
    ]
    store = InMemoryVectorStore.from_texts(
        [text for _, text in passages], embeddings, [{"page": page} for page, _ in passages]
    )
    retriever = store.as_retriever(search_kwargs={"k": 1})
    assert [found.metadata["page"] for found in retriever.invoke(QUESTION)] == ["ollama.md"]

    def joined(found: list[Any]) -> str:
        return "\n\n".join(one.page_content for one in found)

    assert "11434" in chain(retriever | joined, base_url).invoke(QUESTION)


def chain(retriever: Runnable[str, str], base_url: str) -> Any:
    """Answers a question from the passages that the retriever finds."""
    prompt = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
    context = {"context": retriever, "question": RunnablePassthrough()}
    return context | prompt | chat(base_url) | StrOutputParser()
