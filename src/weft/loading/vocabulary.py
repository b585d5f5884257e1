"""Reads and checks the vocabulary of a GGUF file: tokens, merges or scores, token types, special token ids."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from weft.errors import ModelFileError

# Token types in `tokenizer.ggml.token_type` that are not plain text.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

# A file names one EOS token, but many models end an answer with another one. These are the known names.
_END_NAMES = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<eos>", "</s>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>",
}  # fmt: skip

_TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True)
class Vocabulary:
    """All data that a tokenizer is built from."""

    model: str
    """The kind of tokenizer: "gpt2" is byte-level BPE, "llama" SentencePiece BPE."""
    pre_tokenizer: str | None
    """The name of the pre-tokenizer, which splits text before merging. None in old files."""
    architecture: str
    tokens: list[str]
    merge_lines: list[str]
    """The merges as in the file: two tokens, separated by a space."""
    scores: list[float] | None
    control_ids: tuple[int, ...]
    """Control tokens such as `<|im_end|>`. Text of a user is never encoded to one of them."""
    user_defined_ids: tuple[int, ...]
    """Tokens that match as whole strings before BPE, in templates and in user text."""
    byte_ids: tuple[int, ...]
    """`<0x00>` to `<0xFF>` of a SentencePiece vocabulary. They encode characters that have no token."""
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    padding_id: int | None
    end_ids: frozenset[int]
    """Every token that ends an answer."""
    add_bos: bool | None
    """None: not in the file, so the default of the tokenizer family applies."""
    add_space_prefix: bool | None
    add_eos: bool | None = None
    separator_id: int | None = None
    """The token between the texts of a pair."""
    character_map: bytes = b""
    """The normalisation of a unigram vocabulary, compiled by SentencePiece."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """By name. "default" is the template without a name."""

    @property
    def is_of_embedder(self) -> bool:
        """Whether special tokens are added as for an embedding model or a reranker: also at the end of a text, and
        between the texts of a pair."""
        return (
            self.model in ("bert", "t5")
            or self.architecture in ("bert", "modern-bert", "gemma-embedding")
            or (self.add_eos is True)
        )

    @cached_property
    def merges(self) -> list[tuple[str, str]]:
        """The merges as pairs of tokens. They are split on first use: only a tokenizer needs them, the engine does not."""
        pairs = [tuple(line.split(" ")) for line in self.merge_lines]
        for index, pair in enumerate(pairs):
            if len(pair) != 2 or "" in pair:
                raise ModelFileError(
                    f"tokenizer.ggml.merges: entry {index} is {self.merge_lines[index]!r:.80}, "
                    "expected two tokens, separated by a space"
                )
        return pairs  # type: ignore[return-value]  # the loop has checked that each has two elements


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary in the metadata of a GGUF file."""
    tokens = _tokens(metadata)
    types = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens))
    # Tokens of the type "unknown" (the unknown token and padding) are control tokens too: text must not encode to them.
    control = _ids_of_types(types, _CONTROL, _UNKNOWN)
    ids = {
        name: _token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding", "cls", "seperator", "separator")
    }
    named_ends = {ids[name] for name in ("eos", "eot", "eom")}
    pre_tokenizer = metadata.get("tokenizer.ggml.pre")
    return Vocabulary(
        model=_string(metadata, "tokenizer.ggml.model"),
        pre_tokenizer=None if pre_tokenizer is None else _string(metadata, "tokenizer.ggml.pre"),
        architecture=str(metadata.get("general.architecture", "")),
        tokens=tokens,
        merge_lines=_merge_lines(metadata),
        scores=_numbers(metadata, "tokenizer.ggml.scores", len(tokens)),
        control_ids=tuple(control),
        user_defined_ids=tuple(_ids_of_types(types, _USER_DEFINED)),
        byte_ids=tuple(_ids_of_types(types, _BYTE)),
        bos_id=ids["bos"] if ids["bos"] is not None else ids["cls"],
        eos_id=ids["eos"],
        unknown_id=ids["unknown"],
        padding_id=ids["padding"],
        end_ids=frozenset(end for end in named_ends if end is not None) | _ends_by_name(tokens, control),
        add_bos=_flag(metadata, "tokenizer.ggml.add_bos_token"),
        add_space_prefix=_flag(metadata, "tokenizer.ggml.add_space_prefix"),
        add_eos=_flag(metadata, "tokenizer.ggml.add_eos_token"),
        # The format spells the key "seperator".
        separator_id=ids["seperator"] if ids["seperator"] is not None else ids["separator"],
        character_map=_bytes(metadata, "tokenizer.ggml.precompiled_charsmap"),
        chat_templates=_chat_templates(metadata),
    )


def _ends_by_name(tokens: list[str], control_ids: list[int]) -> frozenset[int]:
    """The control tokens whose name is in `_END_NAMES`. A plain token of such a name is ordinary text."""
    ends = {tokens[i]: i for i in control_ids if tokens[i] in _END_NAMES}
    # In the harmony format <|end|> ends a message, not the answer; <|return|> or <|call|> ends the answer.
    if ("<|return|>" in ends and "<|call|>" in ends) or ("<|flush|>" in ends and "<|calls|>" in ends):
        ends.pop("<|end|>", None)
    return frozenset(ends.values())


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    """The tokens by id. Raises ModelFileError if two are equal."""
    # An empty token never occurs in text. It gets a unique name, since the tokenizer needs unique tokens.
    tokens = [
        token or f"[EMPTY_{index}]" for index, token in enumerate(_strings(metadata, "tokenizer.ggml.tokens"))
    ]
    if len(set(tokens)) != len(tokens):
        first: dict[str, int] = {}
        for index, token in enumerate(tokens):
            if first.setdefault(token, index) != index:
                raise ModelFileError(
                    f"tokenizer.ggml.tokens: entries {first[token]} and {index} are both {token!r:.80}; "
                    "tokens must be unique"
                )
    return tokens


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    # In GGUF metadata a list holds strings; numbers are in an `array`.
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelFileError(
            f"{key}: missing, or not a list of strings; the file has no vocabulary that weft can use"
        )
    return value


def _numbers(metadata: Mapping[str, Any], key: str, size: int) -> list[Any] | None:
    value = metadata.get(key)
    if value is None:
        return None
    # Arrays of numbers have `tolist`; a list of strings does not.
    if not hasattr(value, "tolist") or len(value) != size:
        found = len(value) if hasattr(value, "tolist") or isinstance(value, list) else "no list"
        raise ModelFileError(f"{key}: {found} entries for {size} tokens")
    numbers: list[Any] = value.tolist()
    if not all(map(math.isfinite, numbers)):
        bad = next(index for index, number in enumerate(numbers) if not math.isfinite(number))
        raise ModelFileError(f"{key}: entry {bad} is not a finite number")
    return numbers


def _ids_of_types(types: list[Any] | None, *wanted: int) -> list[int]:
    """The tokens of these types. Without types in the file, every token is plain text."""
    return [index for index, token_type in enumerate(types or ()) if token_type in wanted]


def _string(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str):
        raise ModelFileError(f"{key}: missing, or not a string")
    return value


def _flag(metadata: Mapping[str, Any], key: str) -> bool | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelFileError(f"{key}: {value!r:.80} is not true or false")
    return value


def _bytes(metadata: Mapping[str, Any], key: str) -> bytes:
    value = metadata.get(key)
    if value is None:
        return b""
    if not hasattr(value, "tolist") or getattr(value, "itemsize", 0) != 1:
        raise ModelFileError(f"{key}: is not an array of bytes")
    return bytes(value.tobytes())


def _merge_lines(metadata: Mapping[str, Any]) -> list[str]:
    key = "tokenizer.ggml.merges"
    return _strings(metadata, key) if key in metadata else []


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template`, and named ones such as `tokenizer.chat_template.tool_use`."""
    templates: dict[str, str] = {}
    for key in metadata:
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."):
            templates[key.removeprefix(_TEMPLATE).removeprefix(".") or "default"] = _string(metadata, key)
    return templates


def _token_id(metadata: Mapping[str, Any], key: str, size: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise ModelFileError(f"{key}: {value!r:.80} is not the id of one of the {size} tokens")
    return value
