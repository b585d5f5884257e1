"""The C++ kernels (csrc/), as Python sees them. Arrays are contiguous numpy arrays of exactly these types."""

from collections.abc import Sequence

from numpy import ndarray

def available() -> list[str]:
    """The instruction sets that this processor has kernels for, the best first."""

def in_use() -> str: ...
def use(name: str) -> None:
    """Use the kernels of another instruction set, for tests and measurements."""

class Pool:
    """Threads that share the work of a step; a backend has one, and one thread of it calls."""

    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...

class Sampler:
    """From logits to tokens over a pool of threads; weft.backends.cpu.native_sampler is what uses it."""

    def __init__(self, pool: Pool) -> None: ...
    def set_row(
        self,
        row: int,
        top_k: int,
        top_p: float,
        has_min_p: bool,
        min_p_log: float,
        typical_p: float,
        repetition_penalty: float,
        frequency_penalty: float,
        presence_penalty: float,
        biased: Sequence[int],
        biases: Sequence[float],
        min_tokens: int,
        ends: Sequence[int],
        has_grammar: bool,
    ) -> None:
        """What the parameters of the request in `row` ask for; needed before an entry of it that is not plain."""

    def sample(
        self,
        logits: ndarray,  # float32 [S, vocabulary]
        rows: ndarray,  # int64 [S]
        positions: ndarray,  # int64 [S]
        output_indices: ndarray,  # int64 [S]
        seeds: ndarray,  # uint64 [S]
        temperatures: ndarray,  # float64 [S]
        is_plain: ndarray,  # bool [S]
        history: ndarray,  # int32 [rows, positions]
        prompt_lengths: ndarray,  # int64 [rows]
        masked: ndarray,  # int64 [M]: entries
        allowed: ndarray,  # uint8 [M, bytes]: a bit for each token
        top_counts: ndarray,  # int64 [S]; -1: no logprobs
        tokens: ndarray,  # out: int64 [S]
        verdicts: ndarray,  # out: uint8 [S]; 0: good
        logprobs: ndarray,  # out: float64 [S], or empty where nobody asks
        top_tokens: ndarray,  # out: int64 [S, most]
        top_logprobs: ndarray,  # out: float64 [S, most]
    ) -> None: ...
    def score(
        self,
        logits: ndarray,  # float32 [N, vocabulary]
        tokens: ndarray,  # int64 [N]
        top_count: int,
        logprobs: ndarray,  # out: float64 [N]
        top_tokens: ndarray,  # out: int64 [N, top_count]
        top_logprobs: ndarray,  # out: float64 [N, top_count]
    ) -> None: ...
