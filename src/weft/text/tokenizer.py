"""A model's tokenizer: text to token ids, and token ids to bytes.

The library `tokenizers` encodes whole strings, exactly as in transformers. weft adds two things:
- Control tokens in untrusted text are encoded as plain text (see `shield`).
- Every token has its bytes, so that a stream is detokenised without decoding earlier tokens again. If the decoder of
  the file is not a concatenation of bytes, `tokenizers` decodes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import tokenizers
from tokenizers import Regex, normalizers

from weft.errors import InvalidRequestError, ModelFileError
from weft.text.shield import Shield

# Noncharacters: Unicode never assigns them. The shield inserts MARK + _REMOVED, and the normalizer removes both. A MARK
# in the original text becomes MARK + _KEPT; there the normalizer removes only _KEPT.
MARK, _KEPT, _REMOVED = "\ufdd0", "\ufdd1", "\ufdd2"

_SPACE = "▁"  # SentencePiece's character for a space
_SPACE_REPLACED = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens and chat templates in a model's files."""

    bos_id: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """The text of special tokens by their names in chat templates: bos_token, eos_token, ..."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Sources by name. "default" is the template without a name."""


class Tokenizer:
    """Thread-safe. Control tokens in a text are encoded as plain text, unless `allow_control` is set."""

    def __init__(
        self, backend: tokenizers.Tokenizer, specials: SpecialTokens, vocabulary_size: int | None = None
    ) -> None:
        """`vocabulary_size` saves time if the caller knows it: counting copies every token."""
        backend = _match_control_tokens_unnormalised(backend)
        self.specials = specials
        added = backend.get_added_tokens_decoder()
        self.control_tokens = {token_id: token.content for token_id, token in added.items() if token.special}
        self.user_defined_tokens = {
            token_id: token.content for token_id, token in added.items() if not token.special
        }
        self.control_ids = frozenset(self.control_tokens)
        if vocabulary_size is None:
            vocabulary_size = max(backend.get_vocab().values(), default=-1) + 1
        self.vocabulary_size = vocabulary_size
        self._unknown = getattr(backend.model, "unk_token", None) or specials.names.get("unk_token")
        self._alphabet = _alphabet(backend)
        self._shield = Shield(self.control_tokens.values())
        backend.normalizer = _removing_marks(backend.normalizer)
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bytes: dict[int, bytes] = {}

    def lower_case(self) -> None:
        """Makes the tokenizer convert texts to lower case first. Call it before other threads use the tokenizer."""
        self._backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), self._backend.normalizer])

    def encode(
        self, text: str, *, allow_control: bool = False, add_bos: bool | None = None, mark: str = ""
    ) -> list[int]:
        """The token ids of `text`. A byte without a token in the vocabulary is left out, as in every BPE.

        `allow_control` encodes strings such as `<|im_end|>` as control tokens, unless there is a `mark` in them. Only
        for the output of a chat template, in which untrusted text has marks (see `shield`).
        `add_bos` None: the model's files decide.
        """
        _check_unicode(text)
        text = _escaped(text, mark) if allow_control else self._shielded(text)
        files_decide = add_bos is None
        with file_errors("the tokenizer"):
            ids: list[int] = self._backend.encode(text, add_special_tokens=files_decide).ids
            added = self._backend.num_special_tokens_to_add(False) if files_decide else 0
        self._check_control(text, ids, allowed=added)
        bos_id = self.specials.bos_id
        if add_bos and bos_id is not None:
            ids.insert(0, bos_id)
        return ids

    def encode_part(self, text: str, prefix: str = "") -> list[int]:
        """The token ids of a text, without the special tokens of the model's files: see `around`. `prefix` is a trusted
        text before it."""
        _check_unicode(text)
        shielded = prefix + self._shielded(text)
        with file_errors("the tokenizer"):
            ids: list[int] = self._backend.encode(shielded, add_special_tokens=False).ids
            allowed = len(self._backend.encode(prefix, add_special_tokens=False).ids) if prefix else 0
        self._check_control(shielded, ids, allowed)
        return ids

    def around(self, num_parts: int) -> list[list[int]]:
        """The special tokens that the model's files put around a text or a pair of texts: before the first text, between both,
        and after the last."""
        with file_errors("the tokenizer"):
            found = self._backend.post_process(*[_any_token()] * num_parts, add_special_tokens=True)
        runs: list[list[int]] = [[]]
        for token, part in zip(found.ids, found.sequence_ids, strict=True):
            if part is None:
                runs[-1].append(token)
            else:
                runs.append([])
        return runs

    def _shielded(self, text: str) -> str:
        """The text with a mark in each control token, so that none of them is matched."""
        return self._shield.mark_control_tokens(_escaped(text, ""), MARK + _REMOVED)

    def _check_control(self, text: str, ids: list[int], allowed: int) -> None:
        """Rejects text that merges to a control token, which some vocabularies allow. `allowed`: the number of control
        tokens that the model's files or a prefix add.

        The unknown token is harmless: it replaces characters that have no token.
        """
        found = [token for token in ids if self.control_tokens.get(token, self._unknown) != self._unknown]
        if len(found) <= allowed:
            return
        unmarked = [match[0] for match in self._shield.pattern.finditer(text) if match[0] != self._unknown]
        if len(found) > allowed + len(unmarked):
            names = {self.control_tokens[token] for token in found} - set(unmarked)
            raise InvalidRequestError(
                f"this model's tokenizer encodes the text to the control token {min(names, default='')!r} "
                "even as plain text; remove it from the text",
                field="prompt",
            )

    @property
    def is_concatenative(self) -> bool:
        """Whether the text of tokens is the concatenation of their bytes. If not, only `decode` gives the text."""
        return self._alphabet != "other"

    def is_byte(self, token_id: int) -> bool:
        """Whether a token stands for one byte, such as `<0xE4>`."""
        return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, possibly an incomplete character. Without `is_concatenative`: the bytes of the token decoded alone.

        An id without a token has no bytes: the model's output may be padded beyond its vocabulary.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

    @cached_property
    def longest_token(self) -> int:
        """The largest number of bytes of a token. Reads all tokens: 0.1 s for a large vocabulary."""
        return max((len(self._bytes_of(token)) for token in range(self.vocabulary_size)), default=1)

    def token_text(self, token_id: int) -> str:
        """A token as readable text. An incomplete character becomes a replacement character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Sequence[int], *, skip_control: bool = True) -> str:
        """The text of a whole sequence; for a stream use `Detokenizer`.

        A leading space of the first token is kept, since a completion continues its prompt.
        """
        skipped = self.control_ids if skip_control else frozenset()
        if self._alphabet == "other":
            ids = [token for token in token_ids if token not in skipped]
            with file_errors("the tokenizer"):  # some decoders panic on empty text
                text: str = self._backend.decode(ids, skip_special_tokens=False) if ids else ""
            return text
        pieces = (self.token_bytes(token) for token in token_ids if token not in skipped)
        return b"".join(pieces).decode("utf-8", "replace")

    def _bytes_of(self, token_id: int) -> bytes:
        whole = self.control_tokens.get(token_id) or self.user_defined_tokens.get(token_id)
        if whole is not None:
            return whole.encode()
        text = self._backend.id_to_token(token_id) if 0 <= token_id < self.vocabulary_size else None
        if text is None:
            return b""
        if self._alphabet == "bytes":
            return _characters_to_bytes(text)
        if byte := _BYTE_TOKEN.fullmatch(text):
            return bytes.fromhex(byte[1])
        if self._alphabet == "other":
            return self.decode([token_id], skip_control=False).encode()
        return text.replace(_SPACE, " ").encode()


@contextmanager
def file_errors(where: str) -> Iterator[None]:
    """Turns errors and panics of `tokenizers` into a `ModelFileError`."""
    try:
        yield
    except BaseException as error:
        # A panic of Rust code derives from BaseException, not from Exception.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelFileError(f"{where}: {str(error)[:300]}") from error
        raise


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"the text has an unpaired surrogate at character {error.start}; send valid Unicode",
            field="prompt",
        ) from error


def _any_token() -> tokenizers.Encoding:
    """An encoding of one placeholder token, which need not be in the vocabulary."""
    lists = {"tokens": [""], "words": [None], "offsets": [[0, 0]], "overflowing": [], "sequence_ranges": {}}
    numbers = {"ids": [0], "type_ids": [0], "special_tokens_mask": [0], "attention_mask": [1]}
    encoding = tokenizers.Encoding()
    encoding.__setstate__(json.dumps(lists | numbers).encode())
    return encoding


def _escaped(text: str, mark: str) -> str:
    """Escapes a text for the normalizer: `mark` becomes MARK + _REMOVED. If `mark` is not MARK itself, each MARK in the
    text becomes MARK + _KEPT."""
    if mark != MARK:
        text = text.replace(MARK, MARK + _KEPT)
    return text.replace(mark, MARK + _REMOVED) if mark else text


def _removing_marks(normalizer: Any) -> normalizers.Normalizer:
    """The normalizer with steps before it that remove the marks."""
    steps = [
        normalizers.Replace(MARK + _REMOVED, ""),
        # Replaces only _KEPT: replacing MARK too would change the offset of a text's first character.
        normalizers.Replace(Regex(f"(?<={MARK}){_KEPT}"), ""),
    ]
    return normalizers.Sequence(steps if normalizer is None else [*steps, normalizer])


def _match_control_tokens_unnormalised(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Makes the tokenizer match control tokens before normalisation. The normalizer removes the marks (see `shield`):
    in the text without marks, a control token of untrusted text would match too."""
    added = backend.get_added_tokens_decoder().values()
    if not any(token.special and token.normalized for token in added):
        return backend
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        if token["special"]:
            token["normalized"] = False
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _alphabet(backend: tokenizers.Tokenizer) -> Literal["bytes", "pieces", "other"]:
    """How the vocabulary represents text: in GPT-2's byte alphabet, in SentencePiece's form, or by other rules of the
    decoder."""
    decoder = backend.decoder
    state: dict[str, Any] = {"type": None} if decoder is None else json.loads(decoder.__getstate__())
    parts: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    if {part["type"] for part in parts} == {"ByteLevel"}:
        return "bytes"
    space = [part for part in parts if part["type"] in ("Replace", "Metaspace")]
    others = [part for part in parts if part not in space]
    is_pieces = len(space) == 1 and all(map(_is_sentencepiece_step, others))
    if is_pieces and (space[0] == _SPACE_REPLACED or space[0].get("replacement") == _SPACE):
        return "pieces"
    return "other"


def _is_sentencepiece_step(part: dict[str, Any]) -> bool:
    """True if this step of the decoder decodes byte tokens, joins the tokens, or strips the leading space of the text."""
    if part["type"] == "Strip":
        return part["content"] == " " and part["stop"] == 0
    return part["type"] in ("ByteFallback", "Fuse")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: character -> byte.

    Printable Latin-1 characters stand for themselves. The other bytes are, in order, the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _characters_to_bytes(text: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in text)
    except KeyError:  # a token outside the byte alphabet stands for its own text
        return text.encode()
