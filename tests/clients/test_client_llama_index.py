"""llama-index: embeddings, retrieval, and an answer from the retrieved passages."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.node_parser import SentenceSplitter
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from server_process import Server
from vector_models import DIMENSIONS, EMBEDDER

GUIDE = Path(__file__).parents[2] / "docs" / "guide"
PAGES = ("ollama.md", "health.md", "gpu.md")
QUESTION = "Which port do programs written for Ollama expect?"


@pytest.fixture(scope="module")
def embedding(base_url: str) -> OpenAILikeEmbedding:
    return OpenAILikeEmbedding(model_name=EMBEDDER, api_base=base_url, api_key="secret", max_retries=0)


@pytest.fixture(scope="module")
def index(embedding: OpenAILikeEmbedding) -> VectorStoreIndex:
    pages = [Document(text=(GUIDE / name).read_text("utf-8"), metadata={"page": name}) for name in PAGES]
    splitter = SentenceSplitter(chunk_size=200, chunk_overlap=0)
    return VectorStoreIndex.from_documents(pages, embed_model=embedding, transformations=[splitter])


def test_embeddings_are_those_of_the_server(embedding: OpenAILikeEmbedding, served: Server) -> None:
    texts = ["How do I cook rice?", "Boil rice in water."]
    found = embedding.get_text_embedding_batch(texts)
    answer = served.client.post("/v1/embeddings", json={"model": EMBEDDER, "input": texts})
    assert found == [one["embedding"] for one in answer.json()["data"]] and len(found[0]) == DIMENSIONS
    assert embedding.get_query_embedding(texts[0]) == found[0]


def test_a_retriever_finds_the_right_page(index: VectorStoreIndex) -> None:
    best, second = index.as_retriever(similarity_top_k=2).retrieve(QUESTION)
    assert best.metadata["page"] == "ollama.md" and best.score > second.score


def test_a_query_engine_answers_from_the_retrieved_passages(
    index: VectorStoreIndex, base_url: str, model: str
) -> None:
    llm = OpenAILike(
        model=model,
        api_base=base_url,
        api_key="secret",
        is_chat_model=True,
        context_window=2048,
        max_tokens=60,
        temperature=0,
        max_retries=0,
    )
    answer = index.as_query_engine(llm=llm, similarity_top_k=1).query(QUESTION)
    assert "11434" in str(answer) and answer.source_nodes[0].metadata["page"] == "ollama.md"
