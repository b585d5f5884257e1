"""Builds the tokenizers of encoders from the vocabulary of a GGUF file: WordPiece and unigram, and special tokens around
a text or a pair."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from weft.errors import ModelFileError
from weft.loading.vocabulary import Vocabulary
from weft.text.tokenizer import file_errors

_SPACE = "▁"  # GGUF files of BERT have it before the start of a word, and no ## before continuations


def word_pieces(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """The tokenizer of BERT. It converts to lower case and removes accents, as llama.cpp does: the file has no setting."""
    special = {*vocabulary.control_ids}
    pieces: dict[str, int] = {}
    for index, token in enumerate(vocabulary.tokens):
        is_whole = index in special or token.startswith(_SPACE)
        pieces[token.removeprefix(_SPACE) if is_whole else f"##{token}"] = index
    unknown = "[UNK]" if vocabulary.unknown_id is None else vocabulary.tokens[vocabulary.unknown_id]
    with file_errors("tokenizer.ggml.tokens"):
        backend = tokenizers.Tokenizer(
            models.WordPiece(pieces, unk_token=unknown, max_input_chars_per_word=100)
        )
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def unigrams(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """A SentencePiece unigram tokenizer, as XLM-RoBERTa has it."""
    if vocabulary.scores is None:
        raise ModelFileError("tokenizer.ggml.scores: missing; a unigram vocabulary needs them")
    pairs = list(zip(vocabulary.tokens, map(float, vocabulary.scores), strict=True))
    with file_errors("tokenizer.ggml.tokens"):
        backend = tokenizers.Tokenizer(
            models.Unigram(pairs, vocabulary.unknown_id, bool(vocabulary.byte_ids))
        )
    steps: list[normalizers.Normalizer] = []
    if vocabulary.character_map:
        with file_errors("tokenizer.ggml.precompiled_charsmap"):
            steps.append(normalizers.Precompiled(vocabulary.character_map))
    steps += [normalizers.Replace(tokenizers.Regex(" {2,}"), " "), normalizers.Strip()]
    backend.normalizer = normalizers.Sequence(steps)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="always")
    backend.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme="always")
    return backend


def around_texts(vocabulary: Vocabulary, adds_bos: bool) -> processors.PostProcessor:
    """The special tokens around a text or a pair:

    WordPiece     [CLS] A [SEP]     [CLS] A [SEP] B [SEP]
    others        <s> A </s>        <s> A </s> </s> B </s>
    """
    tokens = vocabulary.tokens
    is_word_piece = vocabulary.model == "bert"
    end = vocabulary.separator_id if is_word_piece else vocabulary.eos_id
    adds_end = end is not None and (is_word_piece or vocabulary.add_eos is not False)
    start = vocabulary.bos_id if adds_bos else None
    if not adds_end:
        end = None
    first = [] if start is None else ["start"]
    last = [] if end is None else ["end"]
    between = last if is_word_piece else last * 2
    named = [(name, number) for name, number in (("start", start), ("end", end)) if number is not None]
    return processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *between, "$B:1", *(f"{name}:1" for name in last)],
        special_tokens=[{"id": name, "ids": [number], "tokens": [tokens[number]]} for name, number in named],
    )
