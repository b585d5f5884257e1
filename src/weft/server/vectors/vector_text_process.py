"""The worker process that tokenises long texts for a model that makes vectors or scores."""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

from weft.errors import InvalidRequestError, PromptTooLongError
from weft.loading.checkpoint import open_checkpoint
from weft.loading.embedding_files import embedding_spec
from weft.server.text_work.worker import ignore_signals, serve_jobs
from weft.text.embedding_text import EmbeddingText, NoTokensError

JobKind = Literal["query", "document", "default", "pair"]
"""The prompt before a text: for a query, for a document, or the default of the model's files."""


class VectorTextJob(msgspec.Struct, frozen=True):
    """Texts to tokenise. A pair is a query and a text: the only query, or the one at the same index."""

    kind: JobKind
    texts: list[str]
    truncate: bool
    queries: list[str] = []
    first: int = 0
    """The index of the first text among the inputs of the request."""
    max_document: int | None = None
    """Tokens of the text of a pair that are used."""
    allows_empty: bool = False
    """A text may have no tokens, which is no prompt."""


class VectorTextTokens(msgspec.Struct, frozen=True, tag=True):
    """tokens[i] has the tokens of text i."""

    tokens: list[list[int]]


class VectorTextRefusal(msgspec.Struct, frozen=True, tag=True):
    """Why the text with this index cannot be tokenised. For a text that is too long: its tokens, and the most."""

    index: int
    message: str
    code: str
    lengths: tuple[int, int] | None = None


VectorTextResult = VectorTextTokens | VectorTextRefusal


def convert(text: EmbeddingText, job: VectorTextJob) -> VectorTextResult:
    tokens = []
    queries = job.queries * len(job.texts) if len(job.queries) == 1 else job.queries
    for index, one in enumerate(job.texts, start=job.first):
        try:
            if job.kind == "pair":
                found = text.pair_tokens(
                    queries[index - job.first], one, truncate=job.truncate, max_document=job.max_document
                )
            else:
                kind = None if job.kind == "default" else job.kind
                found = text.tokens(one, kind, truncate=job.truncate)
        except PromptTooLongError as error:
            return VectorTextRefusal(index, str(error), error.code, (error.num_tokens, error.most))
        except InvalidRequestError as error:
            if not (job.allows_empty and isinstance(error, NoTokensError)):
                return VectorTextRefusal(index, str(error), error.code or "invalid_value")
            found = []
        tokens.append(found)
    return VectorTextTokens(tokens)


def main() -> None:
    ignore_signals()
    checkpoint = open_checkpoint(sys.argv[1])
    spec = embedding_spec(checkpoint)
    assert spec is not None, "the server starts this process only for such models"
    text = EmbeddingText(checkpoint, spec)
    jobs = msgspec.msgpack.Decoder(VectorTextJob)
    serve_jobs(lambda job: msgspec.msgpack.encode(convert(text, jobs.decode(job))))


if __name__ == "__main__":
    main()
