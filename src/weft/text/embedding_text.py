"""Turns texts into the tokens that an embedding model or a reranker expects: prompts, special tokens, pairs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

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
_DOCUMENT = "<Document>:"
_RERANK_TASK = "Given a web search query, retrieve relevant passages that answer the query"


class NoTokensError(InvalidRequestError):
    """A text has no tokens, and the model adds none."""


class PairPart(NamedTuple):
    """The query or the document of a pair, tokenised alone: a query is tokenised once for all its documents."""

    tokens: list[int]
    """The tokens, cut to as many as the model can read."""
    num_tokens: int
    """The number of tokens before that cut."""


class EmbeddingText:
    """The text side of one embedding model or reranker. Thread-safe.

    A text that is too long is an error. With `truncate` its end is cut off; of a pair, the end of the longer text, or of
    the document if the reranker answers yes or no.
    """

    def __init__(self, checkpoint: Checkpoint, spec: EmbeddingSpec) -> None:
        self.spec = spec
        self.tokenizer = open_tokenizer(checkpoint)
        if spec.lower_case:
            self.tokenizer.lower_case()
        self._around_text = self.tokenizer.around(1)
        self._around_pair = self.tokenizer.around(2) if spec.kind == "rerank" else [[], [], []]
        self._asks_yes_or_no = spec.kind == "rerank" and checkpoint.architecture == "qwen3"
        if self._asks_yes_or_no:
            start, end = (
                self.tokenizer.encode(text, allow_control=True, add_bos=False)
                for text in (_RERANK_START, _RERANK_END)
            )
            self._around_pair = [start, [], end]

    def tokens(self, text: str, kind: Kind | None = None, *, truncate: bool = False) -> list[int]:
        """The tokens of one text. `kind` selects the prompt that the model expects before it, if it has one. None: the
        default prompt of the model's files, which most models lack."""
        prompt = self.spec.prompts.get("default" if kind is None else kind, "")
        tokens = self.tokenizer.encode_part(text, prompt)
        start, end = self._around_text
        room = self.spec.max_tokens - len(start) - len(end)
        self._check(len(tokens) - room, truncate)
        return _not_empty([*start, *tokens[: max(0, room)], *end])

    def tokens_of(
        self, texts: Iterable[str], kind: Kind | None = None, *, truncate: bool = False
    ) -> list[list[int]]:
        return [self.tokens(text, kind, truncate=truncate) for text in texts]

    # ------------------------------------------------------------------ pairs

    def query_part(self, query: str) -> PairPart:
        if self._asks_yes_or_no:
            task = self.spec.prompts.get("query", _RERANK_TASK)
            # No token crosses the end of a line, so the tokens of both parts are those of the whole text.
            query = f"<Instruct>: {task}\n<Query>: {query}\n"
        return self._part(query)

    def document_part(self, document: str, most: int | None = None) -> PairPart:
        """The tokens of a document. `most`: how many of them are used at most."""
        if not self._asks_yes_or_no:
            return self._part(document, most)
        if most is not None:
            most += len(self.tokenizer.encode_part(_DOCUMENT))
        return self._part(f"{_DOCUMENT} {document}", most)

    def num_pair_tokens(self, query: PairPart, document: PairPart) -> int:
        """The number of tokens of a pair, after it was cut to fit if it is too long."""
        return min(
            self.spec.max_tokens, sum(map(len, self._around_pair)) + query.num_tokens + document.num_tokens
        )

    def pair(self, query: PairPart, document: PairPart, *, truncate: bool = False) -> list[int]:
        """The tokens of a query and a document, for a reranker."""
        start, between, end = self._around_pair
        room = max(0, self.spec.max_tokens - len(start) - len(between) - len(end))
        self._check(query.num_tokens + document.num_tokens - room, truncate)
        cut = (
            [room, max(0, room - query.num_tokens)]
            if self._asks_yes_or_no
            else _cut(query.num_tokens, document.num_tokens, room)
        )
        return _not_empty([*start, *query.tokens[: cut[0]], *between, *document.tokens[: cut[1]], *end])

    def _part(self, text: str, most: int | None = None) -> PairPart:
        tokens = self.tokenizer.encode_part(text)[:most]
        return PairPart(tokens[: self.spec.max_tokens], len(tokens))

    def _check(self, excess: int, truncate: bool) -> None:
        """Raises PromptTooLongError if tokens are too many and may not be cut off."""
        if excess > 0 and not truncate:
            count = self.spec.max_tokens + excess
            raise PromptTooLongError(
                f"the text has {count} tokens, and the model takes at most {self.spec.max_tokens}; "
                "send a shorter text, or ask to truncate it",
                "input",
                count,
                self.spec.max_tokens,
            )


def _not_empty(tokens: list[int]) -> list[int]:
    if not tokens:
        raise NoTokensError("the text has no tokens; send a text that is not empty", field="input")
    return tokens


def _cut(first: int, second: int, room: int) -> tuple[int, int]:
    """The lengths after the longer one was cut until both fit into `room`, as in transformers."""
    short, long = sorted((first, second))
    if short + long > room:
        long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (short, long) if first <= second else (long, short)
