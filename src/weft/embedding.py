"""What an embedding or reranking model computes from a text, and how it expects the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from weft.config import KvCachePoolConfig, SchedulerConfig, ServingEngineConfig

_MAX_RUNNING = 256
_STEP_TOKENS = 1024
"""Tokens of a step, if the longest input is shorter. With more tokens, a CPU does not get faster per token."""
STEP_TOKENS_OF_GPU = 16_384


@dataclass(frozen=True)
class EmbeddingSpec:
    """An embedding model makes a vector of a text. A reranker makes a score of a query and a document."""

    kind: Literal["embed", "rerank"]
    pooling: Literal["mean", "cls", "last"]
    """How a text gets one vector: the mean of its token vectors, or the vector of its first or last token."""
    dimensions: int
    """Numbers in a vector. A reranker has 1: the score."""
    max_tokens: int
    """The longest input, special tokens included."""
    normalise: bool = True
    """Whether each vector is scaled to length 1."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that the model expects before an input: for a "query", for a "document"."""
    lower_case: bool = False
    """Inputs are converted to lower case before they are tokenised. Most tokenizers do it themselves, if it is needed."""
    activation: Literal["none", "sigmoid"] = "none"
    """The function that is applied to the score of a reranker."""
    yes_no: tuple[int, int] | None = None
    """The tokens of yes and no, for a reranker that answers with one of them. The score is the probability of yes if only
    these two are possible."""

    def engine_config(self, *, is_on_gpu: bool = False) -> ServingEngineConfig:
        """The configuration of an engine for this model. Each input is computed whole, in one step."""
        step_tokens = max(STEP_TOKENS_OF_GPU if is_on_gpu else _STEP_TOKENS, self.max_tokens)
        return ServingEngineConfig(
            scheduler=SchedulerConfig(
                max_running=_MAX_RUNNING,
                max_tokens_per_step=step_tokens + _MAX_RUNNING,
                max_prefill_tokens=step_tokens,
                max_chunk_tokens=step_tokens,
                chunked_prefill=False,
                prefix_caching=False,
                max_draft_tokens=0,
            ),
            # One block for each input. It only counts the inputs that run: the backend keeps no K and V.
            cache=KvCachePoolConfig(num_blocks=_MAX_RUNNING, block_size=self.max_tokens + 1, swap_blocks=0),
        )
