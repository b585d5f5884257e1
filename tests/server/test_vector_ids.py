"""The ids under which texts are in the engines: those of the requests that they belong to."""

from __future__ import annotations

from pathlib import Path

from memory_client import MemoryClient, document, noop_memory
from server_process import running_server
from vector_models import embedder_path, noop_reranker

_RECORD = """
import sys
if "launch.py" in " ".join(sys.orig_argv):
    from weft.engine.ipc.client import EngineClient
    submit = EngineClient.submit

    async def recorded(self, request, *arguments, **options):
        with open({path!r}, "a") as file:
            print(request.request_id, file=file)
        return await submit(self, request, *arguments, **options)

    EngineClient.submit = recorded
"""


def test_texts_are_in_the_engines_under_the_id_of_their_request(
    default_model_path: Path, tmp_path: Path
) -> None:
    record = tmp_path / "ids"
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(_RECORD.format(path=str(record)))
    models = [*noop_memory(), noop_reranker(embedder_path())]
    with running_server(default_model_path, vector_models=models, python_path=[str(patch)]) as server:
        client = MemoryClient(server)

        def recorded() -> list[str]:
            """The ids since the last call."""
            ids = record.read_text().split()
            record.write_text("")
            return ids

        store = client.create()
        for seed in range(3):
            client.attach(store, document(seed, 1)[1], f"{seed}.md")
        client.wait(store)
        background = recorded()
        assert len(set(background)) == 3, "each file has an id of its own"

        def request_id(path: str, body: object) -> str:
            response = client.send("POST", path, body)
            assert response.status_code == 200, response.text
            return response.headers["x-request-id"]

        sent = request_id(f"/v1/vector_stores/{store}/search", {"query": ["river", "stone"]})
        embedded, candidates = [f"{sent}-{n}" for n in range(2)], [f"{sent}-{n}" for n in range(3)]
        assert recorded() == [*embedded, *candidates]
        tool = {"type": "file_search", "vector_store_ids": [store]}
        sent = request_id("/v1/responses", {"input": "river", "tools": [tool], "max_output_tokens": 1})
        assert recorded() == [sent, *(f"{sent}-{n}" for n in range(3)), sent], "embedded, ranked, answered"
        sent = request_id("/v1/embeddings", {"input": "river"})
        assert recorded() == [sent]
        sent = request_id("/v1/rerank", {"query": "river", "documents": ["a", "b"]})
        assert recorded() == [f"{sent}-0", f"{sent}-1"]
