"""The default model against transformers: the same greedy text from the same dequantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weft.backends import registry
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
"""Two logits this close are a tie in float32: summing in another order may swap them."""

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


@pytest.fixture(scope="module")
def reference(default_model_file: GgufFile) -> Any:
    """transformers' Llama with our weights, in float32."""
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
    torch.set_num_threads(1)  # as tests/conftest.py says of numpy
    model = LlamaForCausalLM(config).eval()
    outcome = model.load_state_dict(state, strict=False)
    assert outcome.missing_keys in ([], ["lm_head.weight"]) and not outcome.unexpected_keys
    model.tie_weights()
    return model


def neighbours_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of Q or K from the order that turns neighbouring pairs to the one transformers turns halves in."""
    rows, columns = weight.shape
    paired = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2).reshape(rows, columns))


def reference_logits(model: Any, prompt: list[int], text: list[int]) -> np.ndarray:
    """transformers' logits for each place of `text` after `prompt`, all in one forward pass.

    The text is its greedy text exactly when every token is the best of its place: by induction, what stands before
    a token is then what greedy generation would have put there.
    """
    with torch.no_grad():
        output = model(torch.tensor([prompt + text]), use_cache=False, logits_to_keep=len(text) + 1)
    return output.logits[0, :-1].numpy()


def test_greedy_text_equals_transformers_in_one_mixed_batch_with_chunked_prompts(
    default_model_path: Path, default_tokenizer: Tokenizer, reference: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    template = ChatTemplate(default_tokenizer)
    prompts = [default_tokenizer.encode(text) for text in PROMPTS]
    prompts += [template.encode([{"role": "user", "content": text}]) for text in CONVERSATIONS]
    assert len(prompts) == 20 and min(map(len, prompts)) == 1 and max(map(len, prompts)) > 500

    scheduler = SchedulerConfig(
        max_running=20, max_tokens_per_step=256, max_prefill_tokens=192, max_chunk_tokens=64
    )
    engine = ServingEngine(
        registry.build("cpu", checkpoint=open_checkpoint(default_model_path)), ServingEngineConfig(scheduler)
    )
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
                break  # after a tie transformers continues another text
    with capsys.disabled():
        print(f"\n  greedy parity: {len(prompts)} prompts, {ties} ties (best two logits within {TIE})")
    assert ties <= 2, "more ties than chance gives: the logits are less equal than they should be"
