"""The vocabulary of a GGUF file, checked: tokens, merges or scores, kinds of tokens, and the ids with a meaning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from weft.errors import ModelFileError

# How the file marks tokens that are not plain text.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6

# Files name one end token, and many models end a turn with another one. These are the names that model families use.
_END_NAMES = {
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<turn|>", "<end_of_utterance>", "<eos>", "</s>",
    "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "[e~[", "<｜end▁of▁sentence｜>", "<|END_OF_TURN_TOKEN|>",
}  # fmt: skip

_TEMPLATE = "tokenizer.chat_template"


@dataclass(frozen=True)
class Vocabulary:
    """Everything a tokenizer is built from."""

    model: str
    """The kind of tokenizer: "gpt2" is byte-level BPE, "llama" SentencePiece BPE."""
    pre_tokenizer: str | None
    """The name of the rule that cuts text before merging; None in files made before there were names."""
    architecture: str
    tokens: list[str]
    merge_lines: list[str]
    """Two tokens and a space each, as the file has them."""
    scores: list[float] | None
    control_ids: tuple[int, ...]
    """Tokens that steer the model (`<|im_end|>`); text of a user never becomes one of them."""
    user_defined_ids: tuple[int, ...]
    """Whole strings with a token of their own, in anybody's text."""
    byte_ids: tuple[int, ...]
    """`<0x00>` to `<0xFF>` of a SentencePiece vocabulary: bytes of characters that have no token."""
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    padding_id: int | None
    end_ids: frozenset[int]
    """Every token that ends an answer."""
    add_bos: bool | None
    """None: the file does not say, so the family's habit holds."""
    add_space_prefix: bool | None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """By name; "default" is the one of plain conversations."""

    @cached_property
    def merges(self) -> list[tuple[str, str]]:
        """Cut when a tokenizer asks: an engine needs none of them, and there are as many as tokens."""
        pairs = [tuple(line.split(" ")) for line in self.merge_lines]
        for index, pair in enumerate(pairs):
            if len(pair) != 2 or "" in pair:
                raise ModelFileError(
                    f"tokenizer.ggml.merges: entry {index} is {self.merge_lines[index]!r:.80}, "
                    "expected two tokens and a space"
                )
        return pairs  # type: ignore[return-value]  # two each, as was just seen


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """The vocabulary in the metadata of a model file."""
    tokens = _tokens(metadata)
    kinds = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens))
    # An unknown-token that text could become would be as bad as any control token; the others of its kind are padding.
    control = _ids_of(kinds, _CONTROL, _UNKNOWN)
    ids = {
        name: _token_id(metadata, f"tokenizer.ggml.{name}_token_id", len(tokens))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    named_ends = {ids[name] for name in ("eos", "eot", "eom")}
    pre_tokenizer = metadata.get("tokenizer.ggml.pre")
    return Vocabulary(
        model=_word(metadata, "tokenizer.ggml.model"),
        pre_tokenizer=None if pre_tokenizer is None else _word(metadata, "tokenizer.ggml.pre"),
        architecture=str(metadata.get("general.architecture", "")),
        tokens=tokens,
        merge_lines=_merge_lines(metadata),
        scores=_numbers(metadata, "tokenizer.ggml.scores", len(tokens)),
        control_ids=tuple(control),
        user_defined_ids=tuple(_ids_of(kinds, _USER_DEFINED)),
        byte_ids=tuple(_ids_of(kinds, _BYTE)),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        unknown_id=ids["unknown"],
        padding_id=ids["padding"],
        end_ids=frozenset(end for end in named_ends if end is not None) | _ends_by_name(tokens, control),
        add_bos=_flag(metadata, "tokenizer.ggml.add_bos_token"),
        add_space_prefix=_flag(metadata, "tokenizer.ggml.add_space_prefix"),
        chat_templates=_chat_templates(metadata),
    )


def _ends_by_name(tokens: list[str], control_ids: list[int]) -> frozenset[int]:
    """The control tokens that end a turn by their name. A plain token of that name is text, so kinds decide."""
    ends = {tokens[i]: i for i in control_ids if tokens[i] in _END_NAMES}
    # In the harmony format <|end|> only ends one message of several; the turn ends with one of the others.
    if ("<|return|>" in ends and "<|call|>" in ends) or ("<|flush|>" in ends and "<|calls|>" in ends):
        ends.pop("<|end|>", None)
    return frozenset(ends.values())


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    # A token without text can never be written; a name of its own keeps it apart from its like.
    tokens = [
        token or f"[EMPTY_{index}]" for index, token in enumerate(_strings(metadata, "tokenizer.ggml.tokens"))
    ]
    if len(set(tokens)) != len(tokens):
        first: dict[str, int] = {}
        for index, token in enumerate(tokens):
            if first.setdefault(token, index) != index:
                raise ModelFileError(
                    f"tokenizer.ggml.tokens: entries {first[token]} and {index} are both {token!r:.80}; "
                    "a vocabulary has every token once"
                )
    return tokens


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    value = metadata.get(key)
    # The reader makes lists of strings only; an array of numbers is an `array`.
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ModelFileError(
            f"{key}: missing, or not a list of strings; the file has no vocabulary weft can use"
        )
    return value


def _numbers(metadata: Mapping[str, Any], key: str, size: int) -> list[Any] | None:
    value = metadata.get(key)
    if value is None:
        return None
    # Only an array of numbers can be made a list of; strings are one already.
    if not hasattr(value, "tolist") or len(value) != size:
        found = len(value) if hasattr(value, "tolist") or isinstance(value, list) else "no list"
        raise ModelFileError(f"{key}: {found} entries for {size} tokens")
    numbers: list[Any] = value.tolist()
    if not all(map(math.isfinite, numbers)):
        bad = next(index for index, number in enumerate(numbers) if not math.isfinite(number))
        raise ModelFileError(f"{key}: entry {bad} is not a finite number")
    return numbers


def _ids_of(kinds: list[Any] | None, *wanted: int) -> list[int]:
    """The tokens of these kinds; a file that tells of none has plain text alone."""
    return [index for index, kind in enumerate(kinds or ()) if kind in wanted]


def _word(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key)
    if not isinstance(value, str):
        raise ModelFileError(f"{key}: missing, or not a string")
    return value


def _flag(metadata: Mapping[str, Any], key: str) -> bool | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, bool):
        raise ModelFileError(f"{key}: {value!r:.80} is not true or false")
    return value


def _merge_lines(metadata: Mapping[str, Any]) -> list[str]:
    key = "tokenizer.ggml.merges"
    return _strings(metadata, key) if key in metadata else []


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template`, and those with a name: `tokenizer.chat_template.tool_use`."""
    templates: dict[str, str] = {}
    for key in metadata:
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."):
            templates[key.removeprefix(_TEMPLATE).removeprefix(".") or "default"] = _word(metadata, key)
    return templates


def _token_id(metadata: Mapping[str, Any], key: str, size: int) -> int | None:
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < size:
        raise ModelFileError(f"{key}: {value!r:.80} is not the id of one of the {size} tokens")
    return value
