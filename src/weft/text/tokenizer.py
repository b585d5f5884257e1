"""The tokenizer of a model file: text to token ids, and token ids to the bytes they stand for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import tokenizers
from tokenizers import models, pre_tokenizers

from weft.errors import InvalidRequestError, ModelFileError
from weft.loading.vocabulary import Vocabulary


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# How text is cut before merging; a wrong one gives tokens that the model has rarely seen, and no error.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {"gpt-2": _gpt2, "smollm": _smollm}


class Tokenizer:
    """Byte-level BPE. Control tokens in a text are plain text unless the caller says otherwise."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        if vocabulary.model != "gpt2":
            raise ModelFileError(
                f"tokenizer.ggml.model: {vocabulary.model!r:.80} is not supported; weft reads gpt2"
            )
        if vocabulary.pre_tokenizer not in _PRE_TOKENIZERS:
            raise ModelFileError(
                f"tokenizer.ggml.pre: {vocabulary.pre_tokenizer!r:.80} is not supported; "
                f"weft knows {', '.join(sorted(_PRE_TOKENIZERS))}"
            )
        self.vocabulary = vocabulary
        self.control_ids = frozenset(vocabulary.control_ids)
        self._whole_ids = {
            vocabulary.tokens[i]: i for i in (*vocabulary.user_defined_ids, *vocabulary.control_ids)
        }
        self._user_defined = _any_of(vocabulary.tokens[i] for i in vocabulary.user_defined_ids)
        self._all_whole = _any_of(self._whole_ids)
        self._bpe = self._build_bpe()
        self._bytes: dict[int, bytes] = {}

    def _build_bpe(self) -> tokenizers.Tokenizer:
        ids = {token: index for index, token in enumerate(self.vocabulary.tokens)}
        try:
            bpe = tokenizers.Tokenizer(models.BPE(vocab=ids, merges=self.vocabulary.merges))
        except (
            Exception
        ) as error:  # the library raises its base class; a merge of unknown tokens is the usual cause
            raise ModelFileError(f"tokenizer.ggml.merges: {error}") from error
        bpe.pre_tokenizer = _PRE_TOKENIZERS[self.vocabulary.pre_tokenizer]()
        return bpe

    @property
    def end_ids(self) -> frozenset[int]:
        return self.vocabulary.end_ids

    def encode(
        self, text: str, *, allow_control: bool = False, add_bos: bool | None = None, ignore: str = ""
    ) -> list[int]:
        """The token ids of `text`. A byte without a token in the vocabulary is left out, as in every BPE.

        `allow_control` turns strings such as `<|im_end|>` into their tokens: only for text of a chat template.
        `add_bos` None does what the model file says. `ignore` is a character to leave out after control tokens
        were looked for (see `chat_template`).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text has half of a surrogate pair at character {error.start}; send valid Unicode",
                field="prompt",
            ) from error
        pattern = self._all_whole if allow_control else self._user_defined
        ids: list[int] = []
        if self.vocabulary.bos_id is not None and (self.vocabulary.add_bos if add_bos is None else add_bos):
            ids.append(self.vocabulary.bos_id)
        # The pattern has one group, so every second piece is a whole token.
        for index, piece in enumerate(pattern.split(text) if pattern else (text,)):
            if index % 2:
                ids.append(self._whole_ids[piece])
            elif piece:
                plain = piece.replace(ignore, "") if ignore else piece
                ids.extend(self._bpe.encode(plain, add_special_tokens=False).ids)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; it may hold half a character.

        No bytes for an id without a token: a model's output may be wider than its vocabulary, to a round number.
        """
        known = self._bytes.get(token_id)
        if known is None:
            if not 0 <= token_id < len(self.vocabulary.tokens):
                return b""
            text = self.vocabulary.tokens[token_id]
            known = text.encode() if text in self._whole_ids else _characters_to_bytes(text)
            self._bytes[token_id] = known
        return known

    def decode(self, token_ids: Sequence[int], *, skip_control: bool = True) -> str:
        """The text of whole sequences; for a stream use `Detokenizer`."""
        pieces = (
            self.token_bytes(token) for token in token_ids if not (skip_control and token in self.control_ids)
        )
        return b"".join(pieces).decode("utf-8", "replace")


def _any_of(words: Iterable[str]) -> re.Pattern[str] | None:
    """Matches the longest of `words`, as one group; None for none."""
    escaped = [re.escape(word) for word in sorted(words, key=len, reverse=True) if word]
    return re.compile("(" + "|".join(escaped) + ")") if escaped else None


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
