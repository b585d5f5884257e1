"""What the tests of vector stores share: documents that each have a word of their own, uploads, and waiting."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
from server_process import Server, wait_for
from vector_models import embedder_path, noop_embedder

WORDS = [
    "river",
    "stone",
    "window",
    "garden",
    "paper",
    "silver",
    "morning",
    "letter",
    "bridge",
    "market",
    "engine",
    "copper",
    "forest",
    "island",
    "harbour",
    "winter",
    "candle",
    "mirror",
]


def noop_memory(**options: Any) -> list[dict[str, Any]]:
    """The setting `vector_models` of a server whose vectors say only whether two texts are equal."""
    return [noop_embedder(embedder_path(), max_tokens=256, dimensions=32, **options)]


def document(seed: int, num_paragraphs: int = 6) -> tuple[str, str]:
    """A word that is in each paragraph of this document and in no other one, and its text."""
    chance = random.Random(seed)
    name = f"mark{seed}x"
    paragraphs = [f"{name} {' '.join(chance.choices(WORDS, k=40))}." for _ in range(num_paragraphs)]
    return name, "\n\n".join(paragraphs)


def headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


class MemoryClient:
    def __init__(self, server: Server, key: str | None = None) -> None:
        self.http = server.client
        self.headers = headers(key)

    def send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        content = None if body is None else json.dumps(body)
        return self.http.request(method, path, content=content, headers=self.headers)

    def get(self, path: str) -> Any:
        response = self.send("GET", path)
        assert response.status_code == 200, response.text
        return response.json()

    def upload(self, content: bytes | str, name: str = "a.txt") -> str:
        content = content.encode() if isinstance(content, str) else content
        response = self.http.post(
            "/v1/files", data={"purpose": "assistants"}, files={"file": (name, content)}, headers=self.headers
        )
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    def create(self, **fields: Any) -> str:
        response = self.send("POST", "/v1/vector_stores", fields)
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    def attach(self, store: str, content: bytes | str, name: str = "a.txt", **fields: Any) -> str:
        file_id = self.upload(content, name)
        response = self.send("POST", f"/v1/vector_stores/{store}/files", {"file_id": file_id, **fields})
        assert response.status_code == 200, response.text
        return file_id

    def file(self, store: str, file_id: str) -> Any:
        return self.get(f"/v1/vector_stores/{store}/files/{file_id}")

    def wait(self, store: str) -> Mapping[str, int]:
        """Waits until no file of the store is being read. Returns its counts."""
        found: dict[str, Any] = {}

        def is_read() -> bool:
            found.update(self.get(f"/v1/vector_stores/{store}"))
            return found["status"] == "completed"

        wait_for(is_read, 600)
        counts: Mapping[str, int] = found["file_counts"]
        return counts

    def search(self, store: str, query: str | Sequence[str], **fields: Any) -> list[dict[str, Any]]:
        response = self.send("POST", f"/v1/vector_stores/{store}/search", {"query": query, **fields})
        assert response.status_code == 200, response.text
        found: list[dict[str, Any]] = response.json()["data"]
        return found

    def named(self, store: str, name: str) -> list[dict[str, Any]]:
        """The passages that have a word, with the words alone."""
        words_only = {"hybrid_search": {"embedding_weight": 0, "text_weight": 1}}
        return self.search(store, name, max_num_results=50, ranking_options=words_only)

    def nearest(self, store: str, text: str) -> str:
        """The text of the passage whose vector is nearest to that of `text`, without words."""
        vectors_only = {"hybrid_search": {"embedding_weight": 1, "text_weight": 0}}
        found = self.search(store, text, max_num_results=1, ranking_options=vectors_only)
        return str(found[0]["content"][0]["text"]) if found else ""
