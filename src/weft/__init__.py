"""weft: an LLM serving runtime with continuous batching and a paged KV cache.

Public names are imported on first use, so `import weft` takes milliseconds and loads neither numpy nor torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# The module of each public name. The TYPE_CHECKING block below repeats it for type checkers; a test compares the two.
_HOME = {
    "LLM": "weft.llm",
    "PromptJob": "weft.llm",
    "ServingEngine": "weft.engine.serving",
    "ContinuousBatchScheduler": "weft.scheduling.scheduler",
    "ServingEngineConfig": "weft.config",
    "SchedulerConfig": "weft.config",
    "KvCacheKind": "weft.config",
    "KvCachePoolConfig": "weft.config",
    "PriorityPolicy": "weft.config",
    "PreemptionMode": "weft.config",
    "RequestId": "weft.request",
    "Priority": "weft.request",
    "RequestState": "weft.request",
    "FailureKind": "weft.request",
    "FinishReason": "weft.request",
    "SamplingParams": "weft.request",
    "Grammar": "weft.request",
    "InferenceRequest": "weft.request",
    "GenerationResult": "weft.request",
    "TokenLogprobs": "weft.request",
    "TokenOutput": "weft.request",
    "IterationPlan": "weft.plan",
    "WeftError": "weft.errors",
    "InvalidRequestError": "weft.errors",
    "ModelFileError": "weft.errors",
    "OutOfMemoryError": "weft.errors",
    "QueueFullError": "weft.errors",
    "EngineStoppedError": "weft.errors",
}

if TYPE_CHECKING:
    from weft.config import (
        KvCacheKind,
        KvCachePoolConfig,
        PreemptionMode,
        PriorityPolicy,
        SchedulerConfig,
        ServingEngineConfig,
    )
    from weft.engine.serving import ServingEngine
    from weft.errors import (
        EngineStoppedError,
        InvalidRequestError,
        ModelFileError,
        OutOfMemoryError,
        QueueFullError,
        WeftError,
    )
    from weft.llm import LLM, PromptJob
    from weft.plan import IterationPlan
    from weft.request import (
        FailureKind,
        FinishReason,
        GenerationResult,
        Grammar,
        InferenceRequest,
        Priority,
        RequestId,
        RequestState,
        SamplingParams,
        TokenLogprobs,
        TokenOutput,
    )
    from weft.scheduling.scheduler import ContinuousBatchScheduler

__all__ = [
    "LLM",
    "ContinuousBatchScheduler",
    "EngineStoppedError",
    "FailureKind",
    "FinishReason",
    "GenerationResult",
    "Grammar",
    "InferenceRequest",
    "InvalidRequestError",
    "IterationPlan",
    "KvCacheKind",
    "KvCachePoolConfig",
    "ModelFileError",
    "OutOfMemoryError",
    "PreemptionMode",
    "Priority",
    "PriorityPolicy",
    "PromptJob",
    "QueueFullError",
    "RequestId",
    "RequestState",
    "SamplingParams",
    "SchedulerConfig",
    "ServingEngine",
    "ServingEngineConfig",
    "TokenLogprobs",
    "TokenOutput",
    "WeftError",
    "__version__",
]

# Hidden from type checkers: with a module __getattr__ they would accept every misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module 'weft' has no attribute {name!r}")
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
