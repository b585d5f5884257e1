"""transformers tokenizers for the vocabularies of GGUF files, to compare weft's tokenizers with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Split
from transformers import (
    CohereTokenizer,
    GPT2Tokenizer,
    GPTNeoXTokenizer,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

from weft.loading.vocabulary import Vocabulary

TEXTS: list[str] = [
    json.loads(line)
    for line in (Path(__file__).parent / "corpus" / "texts.jsonl").read_text("utf-8").splitlines()
]

# Families with a tokenizer class in transformers.
CLASSES: dict[str, Any] = {
    "command-r": CohereTokenizer,
    "gpt-2": GPT2Tokenizer,
    "mpt": GPTNeoXTokenizer,
    "qwen2": Qwen2Tokenizer,
    "qwen35": Qwen3_5Tokenizer,
}
# Families that transformers reads from GGUF with the correct pre-tokenizer.
FROM_GGUF = ("baichuan", "gemma-4", "llama-bpe", "llama-spm", "phi-3")


def _isolated(pattern: str) -> Split:
    return Split(Regex(pattern), behavior="isolated")


def _plain_bytes() -> ByteLevel:
    return ByteLevel(add_prefix_space=False, use_regex=False)


# The pre-tokenizers of the other families, from their tokenizer.json.
RULES: dict[str, list[Any]] = {
    "deepseek-coder": [
        *(_isolated(pattern) for pattern in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")),
        Digits(individual_digits=True),
        _plain_bytes(),
    ],
    "falcon": [
        Punctuation(behavior="contiguous"),
        ByteLevel(add_prefix_space=False),
        Digits(individual_digits=False),
        _isolated("[0-9][0-9][0-9]"),
    ],
    "refact": [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)],
    "starcoder": [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)],
}

COMPARED = (*CLASSES, *FROM_GGUF, *RULES)


def reference_tokenizer(name: str, path: Path, vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    """The transformers tokenizer for a vocabulary of llama.cpp."""
    tokens = vocabulary.tokens
    if name in FROM_GGUF:
        architecture, description, _ = get_gguf_tokenizer(str(path))
        backend, _ = convert_gguf_tokenizer(architecture, description)
        if name == "llama-bpe":
            backend.model.ignore_merges = True  # as in the tokenizer.json of Llama 3; GGUF has no key for it
    else:
        ids = {token: index for index, token in enumerate(tokens)}
        if name in CLASSES:
            backend = CLASSES[name](vocab=ids, merges=vocabulary.merges).backend_tokenizer
        else:
            backend = Tokenizer(models.BPE(vocab=ids, merges=vocabulary.merges))
            backend.pre_tokenizer = pre_tokenizers.Sequence(RULES[name])
            backend.decoder = decoders.ByteLevel()
        user_defined = [tokens[index] for index in vocabulary.user_defined_ids]
        backend.add_tokens([AddedToken(token, normalized=False) for token in user_defined])
        control = [tokens[index] for index in vocabulary.control_ids]
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    ids = {
        "bos": vocabulary.bos_id,
        "eos": vocabulary.eos_id,
        "unk": vocabulary.unknown_id,
        "pad": vocabulary.padding_id,
    }
    names = {f"{kind}_token": tokens[token_id] for kind, token_id in ids.items() if token_id is not None}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **names)
