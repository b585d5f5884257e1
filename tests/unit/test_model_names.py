"""The names by which requests may call a model."""

from __future__ import annotations

import pytest

from weft.engine.ipc.client import EngineClient
from weft.server.errors import ApiError
from weft.server.models import ModelRegistry
from weft.server.settings import ServerSettings


def is_model_name(name: str, settings: ServerSettings) -> bool:
    models = ModelRegistry(settings, EngineClient("noop", {}, settings.engine), ())
    return models.uses_of(name) == ["generate"]


@pytest.mark.parametrize("name", ["llama", "llama:latest", "claude-opus-5-5", "gpt-5.5", "o3-mini"])
def test_the_model_and_the_names_of_vendors_are_answered(name: str) -> None:
    assert is_model_name(name, ServerSettings(names=("llama",)))


@pytest.mark.parametrize("name", ["lama", "llama:7b", "my-gpt-5", "other", ""])
def test_other_names_are_not(name: str) -> None:
    assert not is_model_name(name, ServerSettings(names=("llama",)))


def test_aliases_replace_those_of_the_vendors() -> None:
    settings = ServerSettings(names=("llama",), aliases={"small": "llama", "big": "no-such-model"})
    assert is_model_name("small", settings) and is_model_name("small:latest", settings)
    assert not is_model_name("big", settings), "the alias of a model that is not served"
    assert not is_model_name("gpt-5.5", settings)
    assert is_model_name("anything", ServerSettings(names=("llama",), aliases={"*": ""}))


def test_an_alias_means_the_model_that_serves_the_route_and_an_own_name_only_itself() -> None:
    settings = ServerSettings(names=("llama",), aliases={"*": "", "small": "mini", "gpt-*": "llama"})
    models = ModelRegistry(settings, EngineClient("noop", {}, settings.engine), ())
    models._names["embed"] = ("mini", "default-embedder")  # without starting its engine
    assert models.uses_of("anything") == ["generate", "embed"]
    assert models.uses_of("llama") == ["generate"] and models.uses_of("mini:latest") == ["embed"]
    assert models.uses_of("small") == ["generate", "embed"], "'*' fits too"
    models.check("gpt-5", "embed")
    with pytest.raises(ApiError, match="generates text") as caught:
        models.check("llama", "embed")
    assert caught.value.status == 400 and caught.value.code == "wrong_model"
    with pytest.raises(ApiError, match="--reranker") as caught:
        models.check(None, "rerank")
    assert caught.value.status == 400
