"""Builds the configuration of an engine from the keywords of `LLM`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

from weft.backends import registry
from weft.config import (
    KvCachePoolConfig,
    PriorityPolicy,
    SchedulerConfig,
    ServingEngineConfig,
    named_choice,
)
from weft.embedding import EmbeddingSpec
from weft.errors import InvalidRequestError


def vector_config(options: Mapping[str, Any], spec: EmbeddingSpec, device: str) -> ServingEngineConfig:
    """The configuration for a model that makes vectors. Its steps and its memory follow from the model."""
    if options:
        name = min(options)
        raise InvalidRequestError(
            f"{name} has no meaning for a model that makes vectors; leave it out", field=name
        )
    return spec.engine_config(is_on_gpu=device == "cuda-embedder")


def build_config(options: dict[str, Any], device: str) -> ServingEngineConfig:
    """Builds the three configurations from one flat set of keywords."""
    parts: dict[type, dict[str, Any]] = {SchedulerConfig: {}, KvCachePoolConfig: {}, ServingEngineConfig: {}}
    known = {field.name: part for part in parts for field in dataclasses.fields(part)}
    choices = {
        field.name: type(field.default)
        for part in parts
        for field in dataclasses.fields(part)
        if isinstance(field.default, Enum)
    }
    # ADAPTIVE limits how long prefill may delay decodes, by measured times. Machines differ too much for a fixed chunk
    # size.
    options = {"policy": PriorityPolicy.ADAPTIVE, **options}
    if device == "cuda" and options.keys().isdisjoint(registry.GPU_BUDGETS):
        options |= registry.GPU_BUDGETS
    for name, value in options.items():
        if name not in known or name in ("scheduler", "cache"):
            names = ", ".join(sorted(set(known) - {"scheduler", "cache"}))
            raise InvalidRequestError(f"LLM has no option {name!r}; allowed: {names}", field=name)
        parts[known[name]][name] = named_choice(name, value, choices[name]) if name in choices else value
    return ServingEngineConfig(
        scheduler=SchedulerConfig(**parts[SchedulerConfig]),
        cache=KvCachePoolConfig(**parts[KvCachePoolConfig]),
        **parts[ServingEngineConfig],
    )
