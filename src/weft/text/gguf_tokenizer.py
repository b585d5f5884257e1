"""Builds a tokenizer from the vocabulary of a GGUF file, which has no tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Iterable

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from weft.errors import ModelFileError
from weft.loading.vocabulary import Vocabulary
from weft.text.families import family_of
from weft.text.gguf_encoder_tokenizer import around_texts, unigrams, word_pieces
from weft.text.tokenizer import SpecialTokens, Tokenizer, file_errors

_SPACE = "▁"  # SentencePiece's character for a space
_RUN = re.compile(f"{_SPACE}{{2,}}|\\n{{2,}}|\\t{{2,}}")
_LONGEST_PIECE = 512  # characters; the longest tokens of real vocabularies have some dozens
_REFUSED = {"rwkv": "RWKV", "plamo2": "PLaMo 2"}


def tokenizer_of(vocabulary: Vocabulary) -> Tokenizer:
    """Builds the tokenizer of a GGUF vocabulary."""
    if vocabulary.model == "gpt2":
        backend, adds_bos = _byte_level(vocabulary)
    elif vocabulary.model in ("llama", "gemma4"):
        backend, adds_bos = _sentencepiece(vocabulary), True
    elif vocabulary.model == "bert":
        backend, adds_bos = word_pieces(vocabulary), True
    elif vocabulary.model == "t5":
        backend, adds_bos = unigrams(vocabulary), True
    else:
        kind = f" ({_REFUSED[vocabulary.model]})" if vocabulary.model in _REFUSED else ""
        raise ModelFileError(
            f"tokenizer.ggml.model: {vocabulary.model!r:.80}{kind} is not supported; weft reads gpt2 (byte-level BPE), "
            "llama (SentencePiece BPE), gemma4, bert (WordPiece) and t5 (unigram)"
        )
    tokens = vocabulary.tokens
    backend.add_special_tokens(_added(tokens[i] for i in vocabulary.control_ids))
    is_byte_level = vocabulary.model == "gpt2"
    # SentencePiece has merges for runs of spaces, so they need not match as whole strings.
    backend.add_tokens(
        _added(
            tokens[i]
            for i in vocabulary.user_defined_ids
            if is_byte_level or not _is_run_of_spaces(tokens[i])
        )
    )
    bos_id = vocabulary.bos_id
    adds_bos = adds_bos if vocabulary.add_bos is None else vocabulary.add_bos
    if vocabulary.is_of_embedder:
        backend.post_processor = around_texts(vocabulary, adds_bos)
    elif bos_id is not None and adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=["bos", "$A"],
            special_tokens=[{"id": "bos", "ids": [bos_id], "tokens": [tokens[bos_id]]}],
        )
    ids = {
        "bos_token": bos_id,
        "eos_token": vocabulary.eos_id,
        "unk_token": vocabulary.unknown_id,
        "pad_token": vocabulary.padding_id,
    }
    if vocabulary.separator_id is not None:
        ids["sep_token"] = vocabulary.separator_id
    names = {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    return Tokenizer(backend, SpecialTokens(bos_id, names, vocabulary.chat_templates), len(tokens))


def _added(texts: Iterable[str]) -> list[AddedToken]:
    return [AddedToken(text, normalized=False) for text in texts]


def _byte_level(vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    family = family_of(vocabulary.pre_tokenizer)
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    with file_errors("tokenizer.ggml.merges"):  # usual cause: a merge of unknown tokens
        model = models.BPE(vocab=ids, merges=_safe_merges(vocabulary), ignore_merges=family.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if family.normalises_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = family.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, family.adds_bos


def _sentencepiece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    tokens = vocabulary.tokens
    # Gemma's files write runs of spaces as spaces; the BPE model needs SentencePiece's character.
    pieces = [_SPACE * len(token) if _is_run_of_spaces(token) else token for token in tokens]
    ids = {token: index for index, token in enumerate(pieces)}
    merges = (
        _safe_merges(vocabulary) if vocabulary.merge_lines else _merges_of_scores(vocabulary, pieces, ids)
    )
    unknown = None if vocabulary.unknown_id is None else tokens[vocabulary.unknown_id]
    with file_errors("tokenizer.ggml.merges" if vocabulary.merge_lines else "tokenizer.ggml.tokens"):
        model = models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    prefix = vocabulary.add_space_prefix
    if prefix is None:
        prefix = vocabulary.model == "llama"
    if prefix and vocabulary.architecture == "phi3":
        # Phi-3 puts a space before every segment of text between special tokens; other models only before the first.
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
        )
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=_SPACE, prepend_scheme="first" if prefix else "never", split=False
        )
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _is_run_of_spaces(token: str) -> bool:
    return len(token) > 1 and not token.strip(" ")


def _control_and_byte_tokens(vocabulary: Vocabulary) -> set[str]:
    """Tokens that merges must never produce: user text could otherwise become a control token."""
    return {vocabulary.tokens[i] for i in (*vocabulary.control_ids, *vocabulary.byte_ids)}


def _safe_merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """The merges whose result is neither a control token nor a byte token."""
    excluded = _control_and_byte_tokens(vocabulary)
    return [merge for merge in vocabulary.merges if merge[0] + merge[1] not in excluded]


def _merges_of_scores(
    vocabulary: Vocabulary, tokens: list[str], ids: dict[str, int]
) -> list[tuple[str, str]]:
    """All pairs of tokens that form a token, in SentencePiece's order of merging: best score first.

    Gemma's scores do not give the order of its merges. For Gemma, runs of white space come first, then the other tokens
    in the order of their ids.
    """
    if vocabulary.architecture.startswith("gemma"):
        scores = [0.0 if _RUN.fullmatch(token) else -1.0 - index for index, token in enumerate(tokens)]
    elif vocabulary.scores is not None:
        scores = vocabulary.scores
    else:
        raise ModelFileError("tokenizer.ggml.scores: missing; a vocabulary without merges needs them")
    excluded = _control_and_byte_tokens(vocabulary)
    excluded |= {
        tokens[i] for i in vocabulary.user_defined_ids if not _is_run_of_spaces(vocabulary.tokens[i])
    }
    pieces = ids.keys() - excluded
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token in excluded:
            continue
        if len(token) > _LONGEST_PIECE:  # the work grows with the square of the length
            raise ModelFileError(
                f"tokenizer.ggml.tokens: entry {ids[token]} has {len(token)} characters; allowed: {_LONGEST_PIECE}"
            )
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in pieces and right in pieces:
                found.append((-score, -cut, cut - len(token), left, right))
    # With equal scores, the longest left part comes first, as in transformers.
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]
