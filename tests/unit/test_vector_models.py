"""How the engines of `weft serve` with --embedder and --reranker are built: their shares of the cores, their weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from reranker_files import write_reranker
from weft.cli import vector_models
from weft.cli.vector_models import EMBEDDER, with_vector_models
from weft.embedding import EmbeddingSpec
from weft.server.settings import ServerSettings
from weft.server.vectors.model_files import VectorModelFiles

SPEC = EmbeddingSpec("embed", pooling="mean", dimensions=4, max_tokens=8)


def models(count: int) -> list[VectorModelFiles]:
    return [VectorModelFiles(SPEC, "", (f"m{n}",), EMBEDDER, {"threads": 2}) for n in range(count)]


def leases(backend: str, count: int) -> tuple[tuple[int, int] | None, ...]:
    """The lease of each engine, that of MODEL first."""
    settings = ServerSettings("m", backend=backend, backend_options={"threads": 2})
    settings, found = vector_models._sharing_cores(settings, models(count))
    engines = (settings.backend_options, *(one.backend_options for one in found))
    assert all(options["threads"] == 2 for options in engines)
    return tuple(options.get("core_lease") for options in engines)


@pytest.mark.parametrize(
    ("backend", "count", "sharing"),
    [
        ("cpu", 0, ()),
        ("cpu", 1, (0, 1)),
        ("cpu", 2, (0, 1, 2)),
        (EMBEDDER, 0, ()),  # MODEL is an embedding model
        (EMBEDDER, 1, (0, 1)),
        ("cuda", 1, ()),  # MODEL computes on the GPU, and the other one has the cores for itself
        ("cuda", 2, (1, 2)),
        ("cuda-embedder", 1, ()),
        ("noop", 1, ()),
    ],
)
def test_the_engines_on_the_cores_share_one_lease_if_there_are_several(
    backend: str, count: int, sharing: tuple[int, ...]
) -> None:
    found = leases(backend, count)
    assert tuple(index for index, lease in enumerate(found) if lease is not None) == sharing
    shared = [lease for lease in found if lease is not None]
    assert len({descriptor for descriptor, _ in shared}) == bool(shared), "one file for all"
    assert sorted(place for _, place in shared) == list(range(len(shared))), "each has a place of its own"


@pytest.mark.parametrize(("model_is_float", "expected"), [(True, "int8"), (False, None)])
def test_quantize_is_for_the_models_whose_weights_are_floats(
    model_is_float: bool, expected: str | None, tmp_path: Path, default_model_path: Path
) -> None:
    reranker = str(write_reranker(tmp_path / "reranker"))
    settings = ServerSettings(
        reranker if model_is_float else str(default_model_path),
        ("m",),
        backend="cpu",
        reranker=None if model_is_float else reranker,
        embedder="default" if model_is_float else None,
        quantize="int8",
        backend_options={"quantize": "int8"},
    )
    settings, [found], _ = with_vector_models(settings)
    assert settings.backend_options["quantize"] == expected
    assert found.backend_options["quantize"] == "int8"
