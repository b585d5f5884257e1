"""A model's tokenizer: text to token ids, and token ids to the bytes they stand for.

`tokenizers` does the work on whole strings, exactly as in transformers. Two things are added: control tokens in
text that people wrote stay text (see `shield`), and every token is known by its bytes, so that a stream of tokens
becomes text without looking back. Where a file's decoder makes more of tokens than their bytes in a row, `tokenizers`
decodes.
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

# Noncharacters, which Unicode promises never to assign. Followed by _GOES the mark is taken out of a text; one that
# was part of it is followed by _STAYS.
MARK, _STAYS, _GOES = "\ufdd0", "\ufdd1", "\ufdd2"

_SPACE = "▁"  # what SentencePiece writes for a space
_SPACE_REPLACED = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Specials:
    """What a model's files say about tokens with a meaning."""

    bos_id: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    """What chat templates call them: bos_token, eos_token, ..."""
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """Sources by name; "default" is the one of plain conversations."""


class Tokenizer:
    """May be used from several threads. Control tokens in a text are plain text unless the caller says otherwise."""

    def __init__(
        self, backend: tokenizers.Tokenizer, specials: Specials, vocabulary_size: int | None = None
    ) -> None:
        """`vocabulary_size` where the caller knows it: to count means to copy every token."""
        backend = _matching_control_tokens_as_written(backend)
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

    def encode(
        self, text: str, *, allow_control: bool = False, add_bos: bool | None = None, mark: str = ""
    ) -> list[int]:
        """The token ids of `text`. A byte without a token in the vocabulary is left out, as in every BPE.

        `allow_control` turns strings such as `<|im_end|>` into their tokens, where no `mark` is in them: only for the
        text of a chat template, which marks what came from outside with a character that occurs nowhere else.
        `add_bos` None does what the model's files say.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has half of a surrogate pair at character {error.start}; send valid Unicode",
                field="prompt",
            ) from error
        if allow_control:
            text = _escaped(text, mark)
        else:
            text = self._shield.mark_whole(_escaped(text, ""), MARK + _GOES)
        follow_files = add_bos is None
        with file_errors("the tokenizer"):
            ids: list[int] = self._backend.encode(text, add_special_tokens=follow_files).ids
            added = self._backend.num_special_tokens_to_add(False) if follow_files else 0
        self._check_control(text, ids, allowed=added)
        bos_id = self.specials.bos_id
        if add_bos and bos_id is not None:
            ids.insert(0, bos_id)
        return ids

    def _check_control(self, text: str, ids: list[int], allowed: int) -> None:
        """Some vocabularies reach control tokens by merging; text that people wrote must not.

        But for the unknown token: what a character without a token becomes steers no model.
        """
        found = [token for token in ids if self.control_tokens.get(token, self._unknown) != self._unknown]
        if len(found) <= allowed:
            return
        written = [match[0] for match in self._shield.pattern.finditer(text) if match[0] != self._unknown]
        if len(found) > allowed + len(written):
            names = {self.control_tokens[token] for token in found} - set(written)
            raise InvalidRequestError(
                f"the text becomes the control token {min(names, default='')!r} even as plain text in this model's "
                "tokenizer; send it without that",
                field="prompt",
            )

    @property
    def is_concatenative(self) -> bool:
        """Whether the text of tokens is their bytes in a row; else it is only what `decode` makes of all of them."""
        return self._alphabet != "other"

    def is_byte(self, token_id: int) -> bool:
        """Whether a token is written as one byte, such as `<0xE4>`."""
        return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "") is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; it may hold half a character. Where that depends on its neighbours: alone.

        No bytes for an id without a token: a model's output may be wider than its vocabulary, to a round number.
        """
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._bytes_of(token_id)
        return known

    @cached_property
    def longest_token(self) -> int:
        """The most bytes that a token stands for. Looks at all of them: a tenth of a second with a large vocabulary."""
        return max((len(self._bytes_of(token)) for token in range(self.vocabulary_size)), default=1)

    def token_text(self, token_id: int) -> str:
        """A token for people, as in a list of likely ones; half a character shows as a replacement character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def decode(self, token_ids: Sequence[int], *, skip_control: bool = True) -> str:
        """The text of whole sequences; for a stream use `Detokenizer`.

        A first token that brings a space keeps it: a completion goes on where its prompt ended.
        """
        skipped = self.control_ids if skip_control else frozenset()
        if self._alphabet == "other":
            ids = [token for token in token_ids if token not in skipped]
            with file_errors("the tokenizer"):  # some decoders panic where there is nothing
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
    """Errors of `tokenizers`, which raises its base class, and panics, as errors of the model file."""
    try:
        yield
    except BaseException as error:
        # A panic derives from BaseException, so that nobody catches it by accident.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelFileError(f"{where}: {str(error)[:300]}") from error
        raise


def _escaped(text: str, mark: str) -> str:
    """`text` as the normalizer expects it: marks go, and whatever else looks like one stays."""
    if mark != MARK:
        text = text.replace(MARK, MARK + _STAYS)
    return text.replace(mark, MARK + _GOES) if mark else text


def _removing_marks(normalizer: Any) -> normalizers.Normalizer:
    steps = [
        normalizers.Replace(MARK + _GOES, ""),
        # Without touching the mark before it: a text's first character must keep its place.
        normalizers.Replace(Regex(f"(?<={MARK}){_STAYS}"), ""),
    ]
    return normalizers.Sequence(steps if normalizer is None else [*steps, normalizer])


def _matching_control_tokens_as_written(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Control tokens that are looked for in normalised text would be found there with the marks gone."""
    added = backend.get_added_tokens_decoder().values()
    if not any(token.special and token.normalized for token in added):
        return backend
    state = json.loads(backend.to_str())
    for token in state["added_tokens"]:
        if token["special"]:
            token["normalized"] = False
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _alphabet(backend: tokenizers.Tokenizer) -> Literal["bytes", "pieces", "other"]:
    """How tokens are written: in the byte alphabet, as SentencePiece's pieces, or by other rules of the file's decoder."""
    decoder = backend.decoder
    state: dict[str, Any] = {"type": None} if decoder is None else json.loads(decoder.__getstate__())
    parts: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
    if {part["type"] for part in parts} == {"ByteLevel"}:
        return "bytes"
    space = [part for part in parts if part["type"] in ("Replace", "Metaspace")]
    others = [part for part in parts if part not in space]
    is_pieces = len(space) == 1 and all(map(_is_of_pieces, others))
    if is_pieces and (space[0] == _SPACE_REPLACED or space[0].get("replacement") == _SPACE):
        return "pieces"
    return "other"


def _is_of_pieces(part: dict[str, Any]) -> bool:
    """Whether a part of a decoder changes nothing but bytes, and the space at the beginning of a text."""
    if part["type"] == "Strip":
        return part["content"] == " " and part["stop"] == 0
    return part["type"] in ("ByteFallback", "Fuse")


def _byte_alphabet() -> dict[str, int]:
    """The characters that stand for the 256 bytes in a byte-level vocabulary.

    Printable Latin-1 stands for itself; the other bytes, in order, for the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _characters_to_bytes(text: str) -> bytes:
    try:
        return bytes(_BYTE_OF_CHARACTER[character] for character in text)
    except KeyError:  # a token that is no byte-level text stands for itself
        return text.encode()
