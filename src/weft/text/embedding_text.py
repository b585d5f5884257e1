"""Turns texts into the tokens that an embedding model or a reranker expects: prompts, special tokens, pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from weft.embedding import EmbeddingSpec
from weft.errors import InvalidRequestError, PromptTooLongError
from weft.loading.checkpoint import Checkpoint
from weft.text.model_text import open_tokenizer

Kind = Literal["query", "document"]

# The prompt of Qwen3-Reranker, from its model card. The files of the model do not have it.
_RERANK_START = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_RERANK_END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_RERANK_TASK = "Given a web search query, retrieve relevant passages that answer the query"


class EmbeddingText:
    """The text side of one embedding model or reranker. Thread-safe.

    A text that is too long is an error. With `truncate` its end is cut off; of a pair, the end of the longer text.
    """

    def __init__(self, checkpoint: Checkpoint, spec: EmbeddingSpec) -> None:
        self.spec = spec
        self.tokenizer = open_tokenizer(checkpoint)
        if spec.lower_case:
            self.tokenizer.lower_case()
        self._start: list[int] = []
        self._end: list[int] = []
        self._asks_yes_or_no = spec.kind == "rerank" and checkpoint.architecture == "qwen3"
        if self._asks_yes_or_no:
            self._start, self._end = (
                self.tokenizer.encode(text, allow_control=True, add_bos=False)
                for text in (_RERANK_START, _RERANK_END)
            )

    def tokens(self, text: str, kind: Kind | None = None, *, truncate: bool = False) -> list[int]:
        """The tokens of one text. `kind` selects the prompt that the model expects before it, if it has one. None: the
        default prompt of the model's files, which most models lack."""
        prompt = self.spec.prompts.get("default" if kind is None else kind, "")
        return self._encode([text], prompt, truncate)

    def pair_tokens(self, query: str, document: str, *, truncate: bool = False) -> list[int]:
        """The tokens of a query and a document, for a reranker."""
        if not self._asks_yes_or_no:
            return self._encode([query, document], "", truncate)
        task = self.spec.prompts.get("query", _RERANK_TASK)
        question = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        tokens = self.tokenizer.encode(question, add_bos=False)
        room = self.spec.max_tokens - len(self._start) - len(self._end)
        if not truncate:
            self._check(len(tokens) + self.spec.max_tokens - room)
        return [*self._start, *tokens[: max(0, room)], *self._end]

    def tokens_of(
        self, texts: Iterable[str], kind: Kind | None = None, *, truncate: bool = False
    ) -> list[list[int]]:
        return [self.tokens(text, kind, truncate=truncate) for text in texts]

    def pairs_of(self, query: str, documents: Iterable[str], *, truncate: bool = False) -> list[list[int]]:
        return [self.pair_tokens(query, document, truncate=truncate) for document in documents]

    def _encode(self, parts: Sequence[str], prompt: str, truncate: bool) -> list[int]:
        most = self.spec.max_tokens
        tokens, count = self.tokenizer.encode_parts(parts, prompt, most if truncate else None)
        if not truncate:
            self._check(count)
        if not tokens:
            raise InvalidRequestError("the text has no tokens; send a text that is not empty", field="input")
        return tokens

    def _check(self, count: int) -> None:
        if count > self.spec.max_tokens:
            raise PromptTooLongError(
                f"the text has {count} tokens, and the model takes at most {self.spec.max_tokens}; "
                "send a shorter text, or ask to truncate it",
                "input",
                count,
                self.spec.max_tokens,
            )
