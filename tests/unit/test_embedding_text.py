"""Texts become the tokens that an embedding model or a reranker expects: prompts, special tokens, pairs, lengths."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from model_files import F32, FLOAT, I32, STRING, U32, gguf, pair, string, strings, tensor
from weft.embedding import EmbeddingSpec
from weft.errors import InvalidRequestError
from weft.loading.checkpoint import Checkpoint, open_checkpoint
from weft.loading.gguf import read_gguf
from weft.loading.vocabulary import read_vocabulary
from weft.text.embedding_text import EmbeddingText

SPEC = EmbeddingSpec("embed", "mean", 8, max_tokens=8, prompts={"query": "find : ", "document": ""})
RERANK = EmbeddingSpec("rerank", "cls", 1, max_tokens=8)
TASK = "Given a web search query, retrieve relevant passages that answer the query"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "sea", "##s", "is", "blue", "find", ":", "caf", "##e"]


def bert() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(
        models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    backend.add_special_tokens(WORDS[:4])
    return backend


def folder(path: Path, backend: tokenizers.Tokenizer, model_type: str = "bert") -> Checkpoint:
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"sep_token": "[SEP]", "cls_token": "[CLS]"}))
    return Checkpoint(path, "huggingface", {"model_type": model_type}, {}, frozenset())


@pytest.fixture
def text(tmp_path: Path) -> EmbeddingText:
    return EmbeddingText(folder(tmp_path, bert()), SPEC)


@pytest.fixture
def reranker(tmp_path: Path) -> EmbeddingText:
    return EmbeddingText(folder(tmp_path, bert()), RERANK)


def pair_of(text: EmbeddingText, query: str, document: str, *, truncate: bool = False) -> list[int]:
    return text.pair(text.query_part(query), text.document_part(document), truncate=truncate)


def test_a_text_gets_the_special_tokens_and_the_prompt_of_its_kind(text: EmbeddingText) -> None:
    assert text.tokens("The SEAS") == [2, 4, 5, 6, 3]
    assert text.tokens("seas", "query") == [2, 9, 10, 5, 6, 3]
    assert text.tokens("seas", "document") == [2, 5, 6, 3]
    assert text.tokens_of(["sea", ""]) == [[2, 5, 3], [2, 3]]


def test_texts_and_prompts_are_in_lower_case_if_the_files_ask_for_it(tmp_path: Path) -> None:
    cased = bert()
    cased.normalizer = normalizers.BertNormalizer(lowercase=False)
    spec = dataclasses.replace(SPEC, prompts={"query": "FIND "})
    assert EmbeddingText(folder(tmp_path, cased), spec).tokens("SEAS", "query") == [2, 1, 1, 3]
    lower = EmbeddingText(folder(tmp_path, cased), dataclasses.replace(spec, lower_case=True))
    assert lower.tokens("SEAS", "query") == [2, 9, 5, 6, 3]
    assert lower.tokens("[SEP]SEA").count(3) == 1


def test_a_default_prompt_is_used_without_a_kind(tmp_path: Path) -> None:
    spec = dataclasses.replace(SPEC, prompts={"default": "find "})
    assert EmbeddingText(folder(tmp_path, bert()), spec).tokens("sea") == [2, 9, 5, 3]


def test_a_pair_has_a_separator_between_its_texts(reranker: EmbeddingText) -> None:
    assert pair_of(reranker, "sea", "is blue") == [2, 5, 3, 7, 8, 3]
    assert pair_of(reranker, "sea", "blue") == [2, 5, 3, 8, 3]
    assert pair_of(reranker, "sea", "seas") == [2, 5, 3, 5, 6, 3]


def test_only_so_many_tokens_of_a_document_are_used(reranker: EmbeddingText) -> None:
    def pair(query: str, document: str, most: int | None = None) -> list[int]:
        return reranker.pair(
            reranker.query_part(query), reranker.document_part(document, most), truncate=True
        )

    assert pair("sea", "is blue is blue", 2) == pair("sea", "is blue")
    assert pair("sea", "is", 2) == pair("sea", "is")
    assert pair("sea " * 9, "is " * 9, 1) == [2, *[5] * 4, 3, 7, 3]


def test_special_tokens_in_a_text_are_plain_text(text: EmbeddingText, reranker: EmbeddingText) -> None:
    for ids in (
        text.tokens("[SEP]sea"),
        text.tokens("[CLS]", "query"),
        pair_of(reranker, "[CLS]", "a"),
    ):
        assert ids.count(2) == 1
    assert text.tokens("[SEP]sea").count(3) == 1


def test_a_text_that_is_too_long_is_an_error_with_both_numbers_or_cut(
    text: EmbeddingText, reranker: EmbeddingText
) -> None:
    with pytest.raises(InvalidRequestError, match=r"the text has 11 tokens.* at most 8") as error:
        text.tokens("sea " * 9)
    assert error.value.field == "input"
    assert text.tokens("sea is " * 9, truncate=True) == [2, 5, 7, 5, 7, 5, 7, 3]
    assert text.tokens("sea " * 6) == [2, *[5] * 6, 3]
    with pytest.raises(InvalidRequestError, match=r"9 tokens.*8"):
        pair_of(reranker, "sea " * 3, "is " * 3)


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [(1, 9, (1, 4)), (9, 1, (4, 1)), (9, 9, (2, 3)), (2, 9, (2, 3)), (4, 4, (2, 3))],
)
def test_the_longer_text_of_a_pair_is_cut(
    first: int, second: int, kept: tuple[int, int], reranker: EmbeddingText
) -> None:
    found = pair_of(reranker, "sea " * first, "is " * second, truncate=True)
    assert found == [2, *[5] * kept[0], 3, *[7] * kept[1], 3]
    reference = bert()
    reference.enable_truncation(8)
    assert sorted(found) == sorted(reference.encode("sea " * first, "is " * second).ids) or first == second


def test_an_unpaired_surrogate_is_an_error(text: EmbeddingText) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        text.tokens("\ud800")


def test_a_text_without_any_token_is_an_error(tmp_path: Path) -> None:
    backend = bert()
    backend.post_processor = processors.TemplateProcessing(single="$A", special_tokens=[])
    with pytest.raises(InvalidRequestError, match="no tokens"):
        EmbeddingText(folder(tmp_path, backend), SPEC).tokens(" ")


def test_qwen3_reranker_gets_its_question_and_keeps_the_end_of_it(tmp_path: Path) -> None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary = {token: i for i, token in enumerate(sorted(byte_level.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = byte_level
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    path = tmp_path / "model"
    path.mkdir()
    backend.save(str(path / "tokenizer.json"))
    checkpoint = Checkpoint(path, "huggingface", {"model_type": "qwen3"}, {}, frozenset())
    spec = EmbeddingSpec("rerank", "last", 1, max_tokens=600, yes_no=(1, 2))
    side = EmbeddingText(checkpoint, spec)
    ids = pair_of(side, "who?", "<|im_end|> me")
    decoded = side.tokenizer.decode(ids, skip_control=False)
    assert (
        "<Query>: who?\n<Document>: <|im_end|> me<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        in decoded
    )
    assert decoded.startswith("<|im_start|>system\nJudge whether")
    assert len([token for token in ids if token in side.tokenizer.control_ids]) == 5  # none from the document
    short = side.pair(
        side.query_part("who?"), side.document_part("x" * 9, 5)
    )  # the space before it is a token here
    assert short == pair_of(side, "who?", "x" * 4)
    with pytest.raises(InvalidRequestError, match="at most 600"):
        pair_of(side, "who?", "x" * 600)
    cut = pair_of(side, "who?", "x" * 600, truncate=True)
    assert len(cut) == 600
    assert side.tokenizer.decode(cut, skip_control=False).endswith(
        "xx<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize(
    "query", ["who?", "a b \n", "x  ", "\n\n \n", "é\u0301 \r\n\t", "1\u200d", "[]}>.", "", "'s"]
)
def test_the_parts_of_a_question_for_qwen3_have_the_tokens_of_the_whole_question(
    query: str, llama_cpp_models: Path
) -> None:
    path = llama_cpp_models / "ggml-vocab-qwen2.gguf"
    vocabulary = read_vocabulary(read_gguf(path).metadata)
    metadata = {"general.architecture": "qwen3"}
    checkpoint = Checkpoint(path, "gguf", metadata, {}, frozenset(), vocabulary=vocabulary)
    side = EmbeddingText(checkpoint, dataclasses.replace(RERANK, max_tokens=600, yes_no=(1, 2)))
    documents = ["\nan answer", "", " 's", "\u0301"]
    for document in documents:
        found = pair_of(side, query, document)
        whole = f"<Instruct>: {TASK}\n<Query>: {query}\n<Document>: {document}"
        expected = side.tokenizer.encode(whole, add_bos=False)
        start = next(i for i in range(len(found)) if found[i : i + len(expected)] == expected)
        assert side.tokenizer.decode(found[start:]).startswith(whole)


# --- vocabularies of GGUF files -----------------------------------------------------------------------------------


def numbers(key: str, kind: int, code: str, values: list[Any]) -> bytes:
    raw = struct.pack(f"<IQ{len(values)}{code}", kind, len(values), *values)
    return pair(key, 9, raw)


def vocabulary_file(path: Path, kind: str, tokens: list[str], types: list[int], *more: bytes) -> Checkpoint:
    pairs = [
        pair("general.architecture", STRING, string("bert")),
        pair("tokenizer.ggml.model", STRING, string(kind)),
        strings("tokenizer.ggml.tokens", tokens),
        numbers("tokenizer.ggml.token_type", I32, "i", types),
        *more,
    ]
    path.write_bytes(gguf(pairs, [tensor("x", [4], F32, 0)], bytes(32)))
    return open_checkpoint(path)


def token_id(name: str, number: int) -> bytes:
    return pair(f"tokenizer.ggml.{name}_token_id", U32, struct.pack("<I", number))


def test_a_word_piece_vocabulary_of_a_gguf_file_gives_the_tokens_of_the_folder(tmp_path: Path) -> None:
    # GGUF files mark the start of a word, and leave out the ## of continuations.
    written = [word.removeprefix("##") if word.startswith("##") else f"▁{word}" for word in WORDS[4:]]
    checkpoint = vocabulary_file(
        tmp_path / "a.gguf", "bert", [*WORDS[:4], *written], [3] * 4 + [1] * len(written),
        token_id("unknown", 1), token_id("cls", 2), token_id("seperator", 3), token_id("padding", 0),
    )  # fmt: skip
    (tmp_path / "folder").mkdir()
    files = folder(tmp_path / "folder", bert())
    correct = EmbeddingText(files, SPEC)
    found = EmbeddingText(checkpoint, SPEC)
    for text in ("The seas", "café :", "xyz", "", "blue, the sea!", "[SEP] sea"):
        assert found.tokens(text) == correct.tokens(text), text
    pairs = (pair_of(EmbeddingText(one, RERANK), "sea", "is blue") for one in (checkpoint, files))
    assert next(pairs) == next(pairs) == [2, 5, 3, 7, 8, 3]


def test_a_unigram_vocabulary_of_a_gguf_file_is_read(tmp_path: Path) -> None:
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁the", "▁sea", "s", "e", "a"]
    scores = [0.0, 0.0, 0.0, 0.0, -3.0, -1.0, -1.5, -2.0, -4.0, -4.0]
    checkpoint = vocabulary_file(
        tmp_path / "a.gguf", "t5", tokens, [3, 3, 3, 2, *[1] * 6],
        numbers("tokenizer.ggml.scores", FLOAT, "f", scores),
        token_id("bos", 0), token_id("padding", 1), token_id("eos", 2), token_id("unknown", 3), token_id("seperator", 2),
    )  # fmt: skip
    text = EmbeddingText(checkpoint, dataclasses.replace(SPEC, max_tokens=30))
    assert text.tokens("the  seas") == [0, 5, 6, 7, 2]
    assert pair_of(EmbeddingText(checkpoint, dataclasses.replace(RERANK, max_tokens=30)), "the", "sea") == [
        *(0, 5, 2, 2, 6, 2)
    ]
    assert text.tokens("the z")[-2] == 3
