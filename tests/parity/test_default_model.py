"""The default model against transformers with the same dequantised weights: equal greedy text and perplexity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.backends import registry
from weft.backends.base import Backend
from weft.config import SchedulerConfig, ServingEngineConfig
from weft.engine.serving import ServingEngine
from weft.loading.checkpoint import open_checkpoint
from weft.loading.gguf import GgufFile
from weft.request import InferenceRequest, RequestState, SamplingParams
from weft.text.chat_template import ChatTemplate
from weft.text.tokenizer import Tokenizer

torch = pytest.importorskip("torch")

NEW_TOKENS = 24
TIE = 1e-4
"""Two logits closer than this are a tie in float32: another summation order may swap them."""

SENTENCE = (
    "The old lighthouse keeper counted the ships that passed in the night, and wrote each name into a book. "
)

PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "1, 2, 3, 4, 5,",
    "def fibonacci(n):\n    ",
    "Q: What is the boiling point of water?\nA:",
    "A",
    "The three primary colors are red,",
    "SELECT name, COUNT(*) FROM users",
    "Dear Sir or Madam,\n\nI am writing to",
    "日本の首都は",
    "L'eau bout à cent degrés et",
    "import numpy as np\n\n\ndef softmax(x):\n",
    "Water is made of hydrogen and oxygen. " * 5,
    SENTENCE * 3 + "One night",
    SENTENCE * 12 + "In the morning",
    SENTENCE * 28 + "At last",
    "List of fruits:\n- apple\n- banana\n-",
]
CONVERSATIONS = [
    "What is the capital of Italy?",
    "Write one sentence about the sea.",
    "How many legs does a spider have, and why do they have so many?",
]


# Lengths of prompts cut from the reading text, around multiples of the block size (16) and the chunk size (64).
LENGTHS = (
    *(1, 2, 3, 5, 8, 13, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 80, 96, 112, 127, 128, 129),
    *(191, 192, 193, 256, 320, 400, 512, 700, 999),
)
WINDOW = 1024
WINDOWS = 3


@pytest.fixture(scope="module")
def reading(default_tokenizer: Tokenizer) -> list[int]:
    """The tokens of tests/data/reading.txt."""
    path = Path(__file__).parents[1] / "data" / "reading.txt"
    return default_tokenizer.encode(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def backend_factory(default_model_path: Path) -> Callable[[], Backend]:
    """The CPU backend with numpy in float32."""
    checkpoint = open_checkpoint(default_model_path)
    return lambda: registry.build("cpu", checkpoint=checkpoint, dtype=np.float32)


@pytest.fixture(scope="module")
def reference(default_model_file: GgufFile) -> Any:
    """transformers' Llama with the dequantised weights of the file, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    file, metadata = default_model_file, default_model_file.metadata
    heads, kv_heads = metadata["llama.attention.head_count"], metadata["llama.attention.head_count_kv"]
    config = LlamaConfig(
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,
    )
    names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    weights = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    for layer in range(metadata["llama.block_count"]):
        for ours, theirs in names.items():
            weights[f"model.layers.{layer}.{theirs}.weight"] = f"blk.{layer}.{ours}.weight"
    state = {}
    for theirs, ours in weights.items():
        values = file.tensors[ours].to_float32()
        if ".q_proj." in theirs or ".k_proj." in theirs:
            values = neighbours_to_halves(values, heads if ".q_proj." in theirs else kv_heads)
        state[theirs] = torch.from_numpy(values)
    torch.set_num_threads(1)  # for the reason given in tests/conftest.py
    model = LlamaForCausalLM(config).eval()
    outcome = model.load_state_dict(state, strict=False)
    assert outcome.missing_keys in ([], ["lm_head.weight"]) and not outcome.unexpected_keys
    model.tie_weights()
    return model


def neighbours_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders the rows of Q or K from interleaved RoPE pairs (GGUF) to pairs of halves (transformers)."""
    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows, columns))


def reference_logits(model: Any, prompt: list[int], text: list[int]) -> np.ndarray:
    """transformers' logits for each token of `text` after `prompt`, in one forward pass.

    `text` is the greedy text exactly if each of its tokens has the highest logit: by induction, the tokens before it
    are those of greedy generation.
    """
    with torch.no_grad():
        output = model(torch.tensor([prompt + text]), use_cache=False, logits_to_keep=len(text) + 1)
    return output.logits[0, :-1].numpy()


def test_greedy_text_equals_transformers_in_one_mixed_batch_with_chunked_prompts(
    backend_factory: Callable[[], Backend],
    default_tokenizer: Tokenizer,
    reading: list[int],
    reference: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    template = ChatTemplate(default_tokenizer)
    prompts = [default_tokenizer.encode(text) for text in PROMPTS]
    prompts += [template.encode([{"role": "user", "content": text}]) for text in CONVERSATIONS]
    prompts += [reading[97 * i : 97 * i + length] for i, length in enumerate(LENGTHS)]
    assert len(prompts) >= 50 and min(map(len, prompts)) == 1 and max(map(len, prompts)) == 999

    scheduler = SchedulerConfig(
        max_running=24, max_tokens_per_step=256, max_prefill_tokens=192, max_chunk_tokens=64
    )
    engine = ServingEngine(backend_factory(), ServingEngineConfig(scheduler))
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    ids = [engine.submit(InferenceRequest(tuple(prompt), params)) for prompt in prompts]
    engine.run_until_idle()
    results = [engine.get_result(request_id) for request_id in ids]
    engine.stop()

    ties = 0
    for prompt, result in zip(prompts, results, strict=True):
        assert result is not None and result.state is RequestState.COMPLETED, result
        assert len(result.tokens) == NEW_TOKENS
        logits = reference_logits(reference, prompt, list(result.tokens))
        for index, (ours, theirs) in enumerate(zip(result.tokens, logits.argmax(axis=1), strict=True)):
            if ours != theirs:
                gap = logits[index, theirs] - logits[index, ours]
                assert gap < TIE, (
                    f"prompt of {len(prompt)}, token {index}: {ours} != {theirs}, {gap} below the best"
                )
                ties += 1
                break  # after a tie the greedy texts differ
    with capsys.disabled():
        print(f"\n  greedy parity: {len(prompts)} prompts, {ties} ties (best two logits within {TIE})")
    assert ties * 100 <= len(prompts) * NEW_TOKENS, "too many ties: the logits are not close enough"


@pytest.fixture(scope="module")
def windows(reading: list[int]) -> list[list[int]]:
    return [reading[start : start + WINDOW] for start in range(0, WINDOW * WINDOWS, WINDOW)]


@pytest.fixture(scope="module")
def their_logprobs(reference: Any, windows: list[list[int]]) -> list[float]:
    logprobs = []
    for window in windows:
        with torch.no_grad():
            logits = reference(torch.tensor([window]), use_cache=False).logits[0, :-1].double()
        picked = torch.log_softmax(logits, dim=1)[torch.arange(WINDOW - 1), torch.tensor(window[1:])]
        logprobs += picked.tolist()
    return logprobs


def our_logprobs(backend: Backend, windows: list[list[int]]) -> list[float]:
    """The prompt logprobs of all windows, computed by the engine in chunks and batches."""
    engine = ServingEngine(backend, ServingEngineConfig(SchedulerConfig(max_running=4)))
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    ids = [engine.submit(InferenceRequest(tuple(window), params)) for window in windows]
    engine.run_until_idle()
    results = [engine.get_result(request_id) for request_id in ids]
    engine.stop()
    logprobs: list[float] = []
    for result in results:
        assert result is not None and result.prompt_logprobs is not None
        logprobs += [one.logprob for one in result.prompt_logprobs if one is not None]
    assert len(logprobs) == WINDOWS * (WINDOW - 1)
    return logprobs


def perplexity(logprobs: list[float]) -> float:
    return float(np.exp(-np.mean(logprobs)))


def test_perplexity_equals_transformers_within_a_thousandth(
    backend_factory: Callable[[], Backend],
    windows: list[list[int]],
    their_logprobs: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    ours = our_logprobs(backend_factory(), windows)
    with capsys.disabled():
        print(f"\n  perplexity: {perplexity(ours):.5f}, transformers {perplexity(their_logprobs):.5f}")
    assert abs(perplexity(ours) / perplexity(their_logprobs) - 1) < 1e-3
    np.testing.assert_allclose(ours, their_logprobs, atol=2e-3)


def test_the_perplexity_of_the_kernels_is_within_half_a_percent_of_float32(
    default_model_path: Path,
    windows: list[list[int]],
    their_logprobs: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The kernels use the quantised weights of the file, 8-bit activations, and quantised K and V."""
    ours = our_logprobs(registry.build("cpu", checkpoint=str(default_model_path)), windows)
    ratio = perplexity(ours) / perplexity(their_logprobs)
    with capsys.disabled():
        print(f"\n  perplexity with the kernels: {100 * (ratio - 1):+.3f}%")
    assert abs(ratio - 1) < 5e-3
