"""Vector stores over HTTP: their life, their files, search, filters, keys, expiry, bad input. The vectors are those of
the noop backend, so what is found is found by its words."""

from __future__ import annotations

import io
import sqlite3
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from memory_client import MemoryClient, document, noop_memory
from server_process import Server, api_key, running_server, wait_for
from vector_models import RERANKER, reranker

from pdf_files import flate_bomb, small_pdf
from weft.server.api.vector_store_shapes import (
    FileBatchObject,
    FileContent,
    FileObject,
    FilePage,
    SearchResults,
    StoreList,
    StoreObject,
)

KEYS = [api_key("one"), api_key("two")]


@pytest.fixture(scope="module")
def server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("state")
    with running_server(
        default_model_path, state_path=str(folder), vector_models=noop_memory(), api_keys=KEYS
    ) as running:
        running.client.headers["x-state"] = str(folder)
        yield running


@pytest.fixture
def one(server: Server) -> MemoryClient:
    return MemoryClient(server, "one")


@pytest.fixture
def two(server: Server) -> MemoryClient:
    return MemoryClient(server, "two")


def test_a_file_is_attached_found_changed_and_removed(one: MemoryClient) -> None:
    store = one.create(name="notes", metadata={"a": "b"})
    described = one.get(f"/v1/vector_stores/{store}")
    msgspec.convert(described, StoreObject)
    assert described["name"] == "notes" and described["file_counts"]["total"] == 0
    name, text = document(1)
    file_id = one.attach(store, text, "river.txt", attributes={"year": 2024, "is_new": True, "tag": "x"})
    assert one.wait(store)["completed"] == 1
    file = one.file(store, file_id)
    msgspec.convert(file, FileObject)
    assert file["attributes"] == {"year": 2024, "is_new": True, "tag": "x"} and file["usage_bytes"] > len(
        text
    )
    response = one.send("POST", f"/v1/vector_stores/{store}/search", {"query": name})
    msgspec.convert(response.json(), SearchResults)
    found = response.json()["data"]
    assert found and {each["filename"] for each in found} == {"river.txt"}
    assert all(each["content"][0]["text"] in text for each in found)
    content = one.get(f"/v1/vector_stores/{store}/files/{file_id}/content")
    msgspec.convert(content, FileContent)
    assert all(part["text"] in text for part in content["data"])
    changed = one.send("POST", f"/v1/vector_stores/{store}/files/{file_id}", {"attributes": {"year": 2025}})
    assert changed.json()["attributes"] == {"year": 2025}
    assert one.search(store, name, filters={"type": "eq", "key": "year", "value": 2025})
    assert not one.search(store, name, filters={"type": "eq", "key": "year", "value": 2024})
    assert one.send("DELETE", f"/v1/vector_stores/{store}/files/{file_id}").json()["deleted"]
    assert one.named(store, name) == [] and one.search(store, name) == []
    assert one.get(f"/v1/files/{file_id}")["id"] == file_id
    assert one.send("DELETE", f"/v1/vector_stores/{store}").json()["object"] == "vector_store.deleted"
    assert one.send("GET", f"/v1/vector_stores/{store}").status_code == 404


def test_results_say_where_in_its_file_a_passage_is(one: MemoryClient) -> None:
    pytest.importorskip("pypdf")
    store = one.create()
    text = f"# Install\n\n{'first ' * 95}\n\n## On Linux\n\nneedle in Markdown\n"
    sizes = {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 0}
    one.attach(store, text, "a.md", chunking_strategy={"type": "static", "static": sizes})
    one.attach(store, small_pdf(["first page", "pin on the second page"]), "b.pdf")
    one.wait(store)
    [found] = one.named(store, "needle")
    assert text[found["start"] : found["end"]] == found["content"][0]["text"]
    assert found["start"] == text.index("## On Linux")
    assert (found["heading"], found["page"]) == ("Install > On Linux", None)
    [found] = one.named(store, "pin")
    # One passage has both pages: it begins on the first one. The offsets are those of the text that was read.
    extracted = "first page\n\npin on the second page"
    assert extracted[found["start"] : found["end"]] == found["content"][0]["text"]
    assert (found["heading"], found["page"]) == ("", 1)
    tool = {"type": "file_search", "vector_store_ids": [store]}
    body = {"input": "needle", "tools": [tool], "include": ["file_search_call.results"]}
    call = one.send("POST", "/v1/responses", {**body, "max_output_tokens": 1}).json()["output"][0]
    result = next(
        result for result in call["results"] if result["filename"] == "a.md" and "needle" in result["text"]
    )
    assert text[result["start"] : result["end"]] == result["text"]
    assert (result["heading"], result["page"]) == ("Install > On Linux", None)
    one.send("DELETE", f"/v1/vector_stores/{store}")


def test_the_chunk_size_of_the_file_or_of_the_store_decides_the_passages(one: MemoryClient) -> None:
    def strategy(most: int, overlap: int) -> dict[str, Any]:
        sizes = {"max_chunk_size_tokens": most, "chunk_overlap_tokens": overlap}
        return {"type": "static", "static": sizes}

    _, text = document(2, 40)
    store = one.create(chunking_strategy=strategy(100, 0))
    small = one.attach(store, text)
    smaller = one.attach(store, text, chunking_strategy=strategy(100, 50))
    large = one.attach(store, text, chunking_strategy=strategy(4096, 0))
    one.wait(store)
    contents = {
        each: [part["text"] for part in one.get(f"/v1/vector_stores/{store}/files/{each}/content")["data"]]
        for each in (small, smaller, large)
    }
    assert len(contents[smaller]) > len(contents[small]) > len(contents[large])
    assert "\n\n".join(contents[small]) == text  # without an overlap, each paragraph is in one passage
    assert len(contents[large]) > 1, "the embedding model reads only 256 tokens"
    one.send("DELETE", f"/v1/vector_stores/{store}")


def test_one_key_never_sees_the_store_of_another(one: MemoryClient, two: MemoryClient) -> None:
    name, text = document(3)
    store = one.create(name="secret")
    file_id = one.attach(store, text)
    batch = one.send("POST", f"/v1/vector_stores/{store}/file_batches", {"file_ids": [file_id]}).json()["id"]
    one.wait(store)
    path = f"/v1/vector_stores/{store}"
    requests: list[tuple[str, str, Any]] = [
        ("GET", path, None),
        ("POST", path, {"name": "mine"}),
        ("DELETE", path, None),
        ("POST", f"{path}/search", {"query": name}),
        ("GET", f"{path}/files", None),
        ("POST", f"{path}/files", {"file_id": file_id}),
        ("GET", f"{path}/files/{file_id}", None),
        ("POST", f"{path}/files/{file_id}", {"attributes": {}}),
        ("GET", f"{path}/files/{file_id}/content", None),
        ("DELETE", f"{path}/files/{file_id}", None),
        ("POST", f"{path}/file_batches", {"file_ids": [file_id]}),
        ("GET", f"{path}/file_batches/{batch}", None),
        ("GET", f"{path}/file_batches/{batch}/files", None),
        ("POST", f"{path}/file_batches/{batch}/cancel", None),
    ]
    for method, where, body in requests:
        refused = two.send(method, where, body)
        assert refused.status_code == 404, (method, where)
        assert refused.json()["error"]["code"] == "vector_store_not_found", (method, where)
    tool = {"type": "file_search", "vector_store_ids": [store]}
    for where, body in (
        ("/v1/responses", {"input": name}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": name}]}),
    ):
        refused = two.send("POST", where, {**body, "tools": [tool]})
        assert refused.status_code == 404 and refused.json()["error"]["code"] == "vector_store_not_found"
    own = two.create()
    stolen = two.send("POST", f"/v1/vector_stores/{own}/files", {"file_id": file_id})
    assert stolen.status_code == 404 and stolen.json()["error"]["code"] == "file_not_found"
    assert [each["id"] for each in two.get("/v1/vector_stores")["data"]] == [own]
    assert one.named(store, name) and two.named(own, name) == []
    for client, each in ((one, store), (two, own)):
        client.send("DELETE", f"/v1/vector_stores/{each}")


def test_file_batches_attach_all_or_nothing_and_can_be_cancelled(one: MemoryClient) -> None:
    store = one.create()
    ids = [one.upload(document(seed)[1]) for seed in range(10, 14)]
    path = f"/v1/vector_stores/{store}/file_batches"
    refused = one.send("POST", path, {"file_ids": [*ids, "file-none"]})
    assert refused.status_code == 404 and one.get(f"/v1/vector_stores/{store}/files")["data"] == []
    files = [{"file_id": each, "attributes": {"n": index}} for index, each in enumerate(ids)]
    made = one.send("POST", path, {"files": files}).json()
    msgspec.convert(made, FileBatchObject)
    assert made["file_counts"]["total"] == 4
    one.wait(store)
    batch = one.get(f"{path}/{made['id']}")
    assert batch["status"] == "completed" and batch["file_counts"]["completed"] == 4
    page = one.get(f"{path}/{made['id']}/files?limit=3&order=asc")
    msgspec.convert(page, FilePage)
    assert page["has_more"] and all(each["attributes"]["n"] in range(4) for each in page["data"])
    cancelled = one.send("POST", f"{path}/{made['id']}/cancel").json()
    assert cancelled["status"] == "cancelled" and cancelled["file_counts"]["completed"] == 4
    large = one.upload(document(14, 3000)[1])
    late = one.send("POST", path, {"file_ids": [large]}).json()["id"]
    assert one.send("POST", f"{path}/{late}/cancel").json()["status"] == "cancelled"
    status = one.file(store, large)["status"]
    assert status == "cancelled" and one.named(store, document(14)[0]) == []
    one.send("DELETE", f"/v1/vector_stores/{store}")


def test_a_deleted_file_leaves_all_stores_and_its_rows_are_removed(one: MemoryClient, server: Server) -> None:
    name, text = document(20)
    stores = [one.create(), one.create()]
    file_id = one.upload(text)
    for store in stores:
        one.send("POST", f"/v1/vector_stores/{store}/files", {"file_id": file_id})
        one.wait(store)
        assert one.named(store, name)
    assert one.send("DELETE", f"/v1/files/{file_id}").json()["deleted"]
    for store in stores:
        assert one.named(store, name) == []
        assert one.get(f"/v1/vector_stores/{store}")["file_counts"]["total"] == 0
        one.send("DELETE", f"/v1/vector_stores/{store}")
    wait_for(lambda: leftovers(server) == [0, 0, 0, 0])


def leftovers(server: Server) -> list[int]:
    """Rows without a visible file, once no store is left."""
    with closing(sqlite3.connect(Path(server.client.headers["x-state"]) / "state.db")) as connection:
        [stores] = connection.execute("SELECT COUNT(*) FROM vector_stores").fetchone()
        [words] = connection.execute(
            "SELECT COUNT(*) FROM sqlite_master WHERE name GLOB 'words_[0-9]*'"
        ).fetchone()
        counts = [
            connection.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]
            for table in ("passages", "vectors")
        ]
    return [stores, words, *counts]


def test_lists_have_pages_and_a_status_filter(one: MemoryClient) -> None:
    stores = [one.create(name=str(index)) for index in range(3)]
    listed = one.get("/v1/vector_stores?limit=2&order=asc")
    msgspec.convert(listed, StoreList)
    assert [each["id"] for each in listed["data"]] == stores[:2] and listed["has_more"]
    rest = one.get(f"/v1/vector_stores?limit=2&order=asc&after={listed['last_id']}")
    assert [each["id"] for each in rest["data"]] == stores[2:]
    one.attach(stores[0], "some words")
    one.attach(stores[0], b"\0\1\2", "b.bin")
    one.wait(stores[0])
    for status, count in (("completed", 1), ("failed", 1), ("in_progress", 0)):
        assert len(one.get(f"/v1/vector_stores/{stores[0]}/files?filter={status}")["data"]) == count
    assert one.send("GET", f"/v1/vector_stores/{stores[0]}/files?filter=fun").status_code == 400
    for store in stores:
        one.send("DELETE", f"/v1/vector_stores/{store}")


def test_a_change_keeps_what_it_leaves_out_and_null_removes_the_expiry(one: MemoryClient) -> None:
    store = one.create(name="a", metadata={"x": "y"}, expires_after={"anchor": "last_active_at", "days": 2})
    path = f"/v1/vector_stores/{store}"
    before = one.get(path)
    assert before["expires_at"] == before["last_active_at"] + 2 * 86400
    renamed = one.send("POST", path, {"name": "b"}).json()
    assert renamed["name"] == "b" and renamed["metadata"] == {"x": "y"} and renamed["expires_at"] is not None
    kept = one.send("POST", path, {"expires_after": None, "metadata": {}}).json()
    assert kept["expires_at"] is None and kept["metadata"] == {} and kept["name"] == "b"
    one.send("DELETE", path)


def test_an_expired_store_is_gone(default_model_path: Path, tmp_path: Path) -> None:
    with running_server(default_model_path, state_path=str(tmp_path), vector_models=noop_memory()) as server:
        client = MemoryClient(server)
        store = client.create(expires_after={"anchor": "last_active_at", "days": 1})
        client.attach(store, document(1)[1])
        client.wait(store)
        with closing(sqlite3.connect(tmp_path / "state.db")) as connection, connection:
            connection.execute("UPDATE vector_stores SET expires_at = 1")
        assert client.send("GET", f"/v1/vector_stores/{store}").status_code == 404
        other = client.create()  # wakes the runner, which removes the rows
        client.attach(other, "words")
        server.client.headers["x-state"] = str(tmp_path)
        client.wait(other)
        wait_for(lambda: leftovers(server)[0] == 1)


BAD_STORES: dict[str, Any] = {
    "metadata with a million entries": {"metadata": {str(index): "x" for index in range(1_000_000)}},
    "metadata with 17 entries": {"metadata": {str(index): "x" for index in range(17)}},
    "a long name": {"name": "x" * 257},
    "no days": {"expires_after": {"anchor": "last_active_at", "days": 0}},
    "another anchor": {"expires_after": {"anchor": "created_at", "days": 1}},
    "a small chunk": {"chunking_strategy": {"type": "static", "static": {"max_chunk_size_tokens": 99}}},
    "a large overlap": {
        "chunking_strategy": {
            "type": "static",
            "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 51},
        }
    },
    "another strategy": {"chunking_strategy": {"type": "magic"}},
    "a number as a name": {"name": 5},
    "too many files": {"file_ids": ["file-a"] * 2001},
}


def test_a_bad_store_is_refused(one: MemoryClient) -> None:
    for case, body in BAD_STORES.items():
        refused = one.send("POST", "/v1/vector_stores", body)
        assert refused.status_code in (400, 413), (case, refused.text[:300])
        assert len(refused.json()["error"]["message"]) < 400, case
    assert one.get("/v1/vector_stores")["data"] == []


BAD_ATTRIBUTES: dict[str, Any] = {
    "a million": {str(index): 1 for index in range(1_000_000)},
    "17": {str(index): 1 for index in range(17)},
    "a long name": {"x" * 65: 1},
    "a long value": {"x": "y" * 513},
    "a list": {"x": [1]},
    "null": {"x": None},
}
EQUAL = {"type": "eq", "key": "a", "value": 1}
BAD_SEARCHES: dict[str, Any] = {
    "no query": {},
    "an empty query": {"query": " "},
    "a long query": {"query": "x" * 4097},
    "nine queries": {"query": ["x"] * 9},
    "no results": {"query": "x", "max_num_results": 0},
    "51 results": {"query": "x", "max_num_results": 51},
    "a threshold of 2": {"query": "x", "ranking_options": {"score_threshold": 2}},
    "no weight": {
        "query": "x",
        "ranking_options": {"hybrid_search": {"embedding_weight": 0, "text_weight": 0}},
    },
    "an unknown comparison": {"query": "x", "filters": {"type": "like", "key": "a", "value": "b"}},
    "no key": {"query": "x", "filters": {"type": "eq", "value": "b"}},
    "a list as a value": {"query": "x", "filters": {"type": "eq", "key": "a", "value": ["b"]}},
    "no parts": {"query": "x", "filters": {"type": "and", "filters": []}},
    "many comparisons": {"query": "x", "filters": {"type": "or", "filters": [EQUAL] * 10_000}},
}


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = EQUAL
    for _ in range(levels):
        found = {"type": "and", "filters": [found]}
    return found


def test_bad_attributes_and_bad_searches_are_refused_with_the_field(one: MemoryClient) -> None:
    store = one.create()
    file_id = one.attach(store, "some words")
    one.wait(store)
    for case, attributes in BAD_ATTRIBUTES.items():
        for path, body in (
            (f"/v1/vector_stores/{store}/files", {"file_id": file_id, "attributes": attributes}),
            (f"/v1/vector_stores/{store}/files/{file_id}", {"attributes": attributes}),
        ):
            refused = one.send("POST", path, body)
            assert refused.status_code in (400, 413), (case, refused.text[:300])
    many = one.send(
        "POST", f"/v1/vector_stores/{store}/file_batches", {"files": [{"file_id": file_id}] * 2001}
    )
    assert many.status_code == 400 and "2001" in many.json()["error"]["message"]
    for case, body in {**BAD_SEARCHES, "deep": {"query": "x", "filters": nested(17)}}.items():
        refused = one.send("POST", f"/v1/vector_stores/{store}/search", body)
        error = refused.json()["error"]
        assert refused.status_code == 400 and error["param"], (case, refused.text[:300])
    # No operator of the words search, and no SQL.
    for query in (
        '"',
        "a AND",
        "NEAR(a b)",
        "x*",
        "col:x",
        "'; DROP TABLE passages;--",
        "\0",
        "^",
        "(" * 500,
    ):
        assert one.send("POST", f"/v1/vector_stores/{store}/search", {"query": query}).status_code == 200, (
            query
        )
    assert one.file(store, file_id)["status"] == "completed"
    one.send("DELETE", f"/v1/vector_stores/{store}")


def zip_bomb() -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", bytes(20 << 20))
    return content.getvalue()


PDF_LOOP = (
    b"%PDF-1.4\n1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj\n2 0 obj<</Type/Pages/Kids[2 0 R]/Count 9>>endobj\n"
    b"trailer<</Root 1 0 R>>"
)
BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.txt", b" \n", "empty"),
    "a broken PDF": ("a.pdf", b"%PDF-1.7\n" + bytes(range(256)) * 40, "PDF"),
    "a PDF that contains itself": ("a.pdf", PDF_LOOP, "PDF"),
    "a zip bomb": ("a.docx", zip_bomb(), "zip container"),
    "a zip bomb named text": ("a.txt", zip_bomb(), "zip container"),
    "latin-1": ("a.txt", "Äpfel".encode("latin-1"), "UTF-8"),
    "binary": ("a.txt", b"text\0more", "zero byte"),
    "HTML without text": ("a.html", b"<html><script>x</script></html>", "no text"),
}


def test_a_bad_file_fails_with_a_reason_and_the_others_are_read(one: MemoryClient) -> None:
    store = one.create()
    ids = {case: one.attach(store, content, name) for case, (name, content, _) in BAD_FILES.items()}
    name, text = document(30)
    hidden = one.attach(store, text, "../../../etc/passwd")
    line = one.attach(store, "y" * (10 << 20), "line.txt")
    deep = one.attach(store, "<div>" * 100_000 + f"<p>deep{name}</p>", "deep.html")
    counts = one.wait(store)
    for case, (_, _, reason) in BAD_FILES.items():
        file = one.file(store, ids[case])
        assert file["status"] == "failed" and reason in file["last_error"]["message"], (case, file)
    assert counts["failed"] >= len(BAD_FILES) and one.file(store, hidden)["status"] == "completed"
    assert one.named(store, name)[0]["filename"].endswith("passwd")
    assert one.named(store, f"deep{name}")[0]["file_id"] == deep
    ended = one.file(store, line)
    assert ended["status"] in ("completed", "failed") and (ended["last_error"] or ended["usage_bytes"])
    one.send("DELETE", f"/v1/vector_stores/{store}")


def test_a_pdf_that_unpacks_to_gigabytes_ends_only_the_process_that_reads_it(
    default_model_path: Path, tmp_path: Path
) -> None:
    """pypdf has a limit of its own, which is lifted in one of two servers."""
    pypdf = pytest.importorskip("pypdf")
    if not hasattr(pypdf, "overwrite_configuration"):
        pytest.skip("this pypdf has no limit that could be lifted")
    patch = tmp_path / "patch"
    patch.mkdir()
    (patch / "sitecustomize.py").write_text(
        """
import sys
if "weft.server.memory.reading_process" in sys.orig_argv:
    import pypdf
    pypdf.overwrite_configuration(zlib_maximum_output_length=0)
"""
    )
    bomb = flate_bomb(4 << 30)
    for python_path, reason in (
        ([], "the PDF is broken: LimitReachedError"),
        ([str(patch)], "MiB of memory"),
    ):
        with running_server(
            default_model_path, vector_models=noop_memory(), python_path=python_path
        ) as server:
            one = MemoryClient(server)
            store = one.create()
            file_id = one.attach(store, bomb, "bomb.pdf")
            good = one.attach(store, document(1)[1], "good.md")
            one.wait(store)
            file = one.file(store, file_id)
            assert file["status"] == "failed" and reason in file["last_error"]["message"], file
            assert one.file(store, good)["status"] == "completed"
            assert one.named(store, document(1)[0])


def test_a_server_without_an_embedding_model_says_how_to_get_one(default_model_path: Path) -> None:
    with running_server(default_model_path) as server:
        refused = MemoryClient(server).send("POST", "/v1/vector_stores", {})
        assert refused.status_code == 400 and "--embedder" in refused.json()["error"]["message"]


def test_another_embedding_model_cannot_search_the_vectors(default_model_path: Path, tmp_path: Path) -> None:
    settings = {"state_path": str(tmp_path)}
    with running_server(default_model_path, vector_models=noop_memory(), **settings) as server:
        client = MemoryClient(server)
        store = client.create()
        client.attach(store, "some words")
        client.wait(store)
    [other] = noop_memory()
    other["names"] = ["other"]
    with running_server(default_model_path, vector_models=[other], **settings) as server:
        client = MemoryClient(server)
        refused = client.send("POST", f"/v1/vector_stores/{store}/search", {"query": "words"})
        assert refused.status_code == 409 and "'noop-embedder'" in refused.json()["error"]["message"]
        file_id = client.attach(store, "more words")
        client.wait(store)
        assert "same embedding model" in client.file(store, file_id)["last_error"]["message"]


def test_a_reranker_orders_the_passages_and_gives_the_scores(
    default_model_path: Path, tmp_path: Path
) -> None:
    models = [*noop_memory(), reranker(tmp_path / "model")]
    with running_server(default_model_path, vector_models=models) as server:
        client = MemoryClient(server)
        store = client.create()
        client.attach(store, document(1, 30)[1])
        client.wait(store)
        query = document(1)[0]
        reranked = client.search(store, query, max_num_results=5)
        texts = [each["content"][0]["text"] for each in reranked]
        asked = {"model": RERANKER, "query": query, "documents": texts}
        scores = client.send("POST", "/v1/rerank", asked).json()["results"]
        by_index = {each["index"]: each["relevance_score"] for each in scores}
        assert [each["score"] for each in reranked] == pytest.approx([by_index[i] for i in range(len(texts))])
        assert sorted(by_index.values(), reverse=True) == pytest.approx(
            list(dict(sorted(by_index.items())).values())
        )
        plain = client.search(store, query, max_num_results=5, ranking_options={"ranker": "none"})
        assert [each["score"] for each in plain] != [each["score"] for each in reranked]


def test_a_second_server_with_the_same_folder_finds_what_the_first_adds_and_removes(
    default_model_path: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"state_path": str(tmp_path), "vector_models": noop_memory()}
    with running_server(default_model_path, **settings) as first:
        one = MemoryClient(first)
        store = one.create()
        names = [document(seed)[0] for seed in (1, 2)]
        ids = [one.attach(store, document(1)[1])]
        one.wait(store)
        with running_server(default_model_path, **settings) as second:
            two = MemoryClient(second)
            assert two.search(store, names[0]) and two.named(store, names[1]) == []
            ids.append(one.attach(store, document(2)[1]))
            one.wait(store)
            assert {each["file_id"] for each in two.search(store, names[1], max_num_results=50)} == {*ids}
            one.send("DELETE", f"/v1/vector_stores/{store}/files/{ids[0]}")
            assert {each["file_id"] for each in two.search(store, names[0], max_num_results=50)} == {ids[1]}


def test_the_openai_package_uses_vector_stores_in_strict_types(server: Server) -> None:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="one", max_retries=0, _strict_response_validation=True
    ) as client:
        store = client.vector_stores.create(name="papers", metadata={"a": "b"})
        name, text = document(40)
        file = client.vector_stores.files.upload_and_poll(
            vector_store_id=store.id, file=("paper.md", text.encode()), attributes={"year": 2024}
        )
        assert file.status == "completed" and file.attributes == {"year": 2024}
        batch = client.vector_stores.file_batches.upload_and_poll(
            store.id, files=[(f"{seed}.txt", document(seed)[1].encode()) for seed in (41, 42)]
        )
        assert batch.status == "completed" and batch.file_counts.completed == 2
        found = client.vector_stores.search(
            store.id,
            query=name,
            max_num_results=3,
            filters={"type": "and", "filters": [{"type": "gte", "key": "year", "value": 2024}]},
            rewrite_query=True,
            ranking_options={"ranker": "auto", "score_threshold": 0.0},
        )
        assert [each.filename for each in found.data][:1] == ["paper.md"] and found.data[0].content[
            0
        ].text in text
        assert client.vector_stores.retrieve(store.id).file_counts.completed == 3
        assert len(list(client.vector_stores.files.list(store.id, limit=2))) == 3
        content = client.vector_stores.files.content(file.id, vector_store_id=store.id)
        assert content.data[0].text in text
        assert client.vector_stores.update(store.id, name="b").name == "b"
        assert client.vector_stores.files.delete(file.id, vector_store_id=store.id).deleted
        assert client.vector_stores.delete(store.id).deleted
