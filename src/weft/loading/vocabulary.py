"""The vocabulary a GGUF file carries, checked: tokens, merges, kinds of tokens, and the ids with a meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.errors import ModelFileError

# How the file marks tokens that are not plain text.
_CONTROL, _USER_DEFINED = 3, 4


@dataclass(frozen=True)
class Vocabulary:
    """Everything a tokenizer is built from."""

    model: str
    pre_tokenizer: str
    tokens: list[str]
    merges: list[tuple[str, str]]
    control_ids: tuple[int, ...]
    """Tokens that steer the model (`<|im_end|>`); text of a user never becomes one of them."""
    user_defined_ids: tuple[int, ...]
    """Whole strings with a token of their own, in anybody's text."""
    bos_id: int | None
    eos_id: int | None
    end_ids: frozenset[int]
    """Every token that ends an answer."""
    add_bos: bool
    chat_template: str | None


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary in the metadata of a model file."""
    tokens = _strings(metadata, "tokenizer.ggml.tokens")
    kinds = metadata.get("tokenizer.ggml.token_type")
    if kinds is None:
        kinds = np.ones(len(tokens), np.int32)
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        found = len(kinds) if isinstance(kinds, np.ndarray | list) else "no list"
        raise ModelFileError(f"tokenizer.ggml.token_type: {found} entries for {len(tokens)} tokens")
    ends = [
        _token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in ("eos", "eot", "eom")
    ]
    template = metadata.get("tokenizer.chat_template")
    return Vocabulary(
        model=_word(metadata, "tokenizer.ggml.model"),
        pre_tokenizer=_word(metadata, "tokenizer.ggml.pre"),
        tokens=tokens,
        merges=_merges(metadata),
        control_ids=tuple(np.flatnonzero(kinds == _CONTROL).tolist()),
        user_defined_ids=tuple(np.flatnonzero(kinds == _USER_DEFINED).tolist()),
        bos_id=_token_id(metadata, "tokenizer.ggml.bos_token_id", len(tokens)),
        eos_id=ends[0],
        end_ids=frozenset(end for end in ends if end is not None),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token") is True,
        chat_template=template if isinstance(template, str) else None,
    )


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    # The reader makes lists of strings only; an array of numbers is a numpy array.
    if not isinstance(value, list) or not value:
        raise ModelFileError(
            f"{key}: missing, or not a list of strings; the file has no vocabulary weft can use"
        )
    return value


def _word(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str):
        raise ModelFileError(f"{key}: missing, or not a string")
    return value


def _merges(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    if "tokenizer.ggml.merges" not in metadata:
        return []
    merges: list[tuple[str, str]] = []
    for index, merge in enumerate(_strings(metadata, "tokenizer.ggml.merges")):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise ModelFileError(
                f"tokenizer.ggml.merges: entry {index} is {merge!r:.80}, expected two tokens and a space"
            )
        merges.append((left, right))
    return merges


def _token_id(metadata: Mapping[str, Any], key: str, size: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise ModelFileError(f"{key}: {value!r:.80} is not the id of one of the {size} tokens")
    return value
