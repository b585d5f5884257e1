"""The worker process that tokenises long texts for a model that makes vectors or scores."""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

from weft.errors import InvalidRequestError, PromptTooLongError
from weft.loading.checkpoint import open_checkpoint
from weft.loading.embedding_files import embedding_spec
from weft.server.text_work.worker import ignore_signals, serve_jobs
from weft.text.embedding_text import EmbeddingText, NoTokensError, PairPart

JobKind = Literal["query", "document", "default", "pair_query", "pair_document"]
"""The prompt that is put before a text: for a query, for a document, or the default of the model's files. pair_query and
pair_document: the text is this part of a pair."""


class VectorTextJob(msgspec.Struct, frozen=True):
    """Texts to tokenise."""

    kind: JobKind
    texts: list[str]
    truncate: bool
    first: int = 0
    """The index of the first text among the inputs of the request."""
    max_document: int | None = None
    """At most this many tokens of the document of a pair are used."""
    allows_empty: bool = False
    """A text may have no tokens. Otherwise such a text is an error."""


class VectorTextTokens(msgspec.Struct, frozen=True, tag=True):
    """The tokens of each text. A part of a pair is cut; its `num_tokens` are those before the cut."""

    parts: list[PairPart]


class VectorTextRefusal(msgspec.Struct, frozen=True, tag=True):
    """Why the text with this index cannot be tokenised. `lengths`, for a text that is too long: the number of its tokens,
    and the limit."""

    index: int
    message: str
    code: str
    lengths: tuple[int, int] | None = None


VectorTextResult = VectorTextTokens | VectorTextRefusal


def convert(text: EmbeddingText, job: VectorTextJob) -> VectorTextResult:
    """Tokenises the texts. Returns a refusal at the first text that cannot be tokenised."""
    parts = []
    for index, one in enumerate(job.texts, start=job.first):
        try:
            if job.kind == "pair_query":
                part = text.query_part(one)
            elif job.kind == "pair_document":
                part = text.document_part(one, job.max_document)
            else:
                tokens = text.tokens(one, None if job.kind == "default" else job.kind, truncate=job.truncate)
                part = PairPart(tokens, len(tokens))
        except PromptTooLongError as error:
            return VectorTextRefusal(index, str(error), error.code, (error.num_tokens, error.most))
        except InvalidRequestError as error:
            if not (job.allows_empty and isinstance(error, NoTokensError)):
                return VectorTextRefusal(index, str(error), error.code or "invalid_value")
            part = PairPart([], 0)
        parts.append(part)
    return VectorTextTokens(parts)


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
