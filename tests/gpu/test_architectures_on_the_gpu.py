"""Small random models of several architectures on the GPU against transformers.

The reference is transformers in float32 on the same weights. weft computes in bfloat16. Its error may be at most
FACTOR times that of transformers in bfloat16.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu_runs import open_on_gpu
from small_models import Case, build_model

from weft.loading.checkpoint import open_checkpoint
from weft.request import GenerationResult, RequestState, SamplingParams

torch = pytest.importorskip("torch")

VOCABULARY = 509
NEW_TOKENS = 40
TOP = 20
FACTOR, FLOOR = 2.0, 0.003

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 336,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
EXPERTS = {"num_experts_per_tok": 2}

CASES = {
    "llama, groups of 3, heads of 80": Case(
        "Llama", {**SIZES, "hidden_size": 480, "num_attention_heads": 6, "num_key_value_heads": 2}
    ),
    "llama, tied, biases": Case(
        "Llama", {**SIZES, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "mistral, window": Case("Mistral", {**SIZES, "head_dim": 64, "sliding_window": 24}),
    "qwen2, groups of 7": Case(
        "Qwen2", {**SIZES, "hidden_size": 448, "num_attention_heads": 7, "num_key_value_heads": 1}
    ),
    "qwen3, heads of 128": Case("Qwen3", {**SIZES, "head_dim": 128, "tie_word_embeddings": True}),
    "phi3, heads of 96": Case("Phi3", {**SIZES, "hidden_size": 384}),
    "granite": Case(
        "Granite",
        {
            **SIZES,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.15,
            "logits_scaling": 5.0,
        },
    ),
    "olmo2": Case("Olmo2", SIZES),
    "gemma2, heads of 256": Case(
        "Gemma2",
        {
            **SIZES,
            "num_hidden_layers": 4,
            "head_dim": 256,
            "sliding_window": 24,
            "query_pre_attn_scalar": 64,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": Case(
        "Gemma3",
        {
            **SIZES,
            "num_hidden_layers": 7,
            "head_dim": 64,
            "sliding_window": 24,
            "query_pre_attn_scalar": 64,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
            },
        },
        config="Gemma3TextConfig",
    ),
    "mixtral": Case("Mixtral", {**SIZES, **EXPERTS, "head_dim": 64, "num_local_experts": 5}),
    "qwen3 moe": Case(
        "Qwen3Moe",
        {
            **SIZES,
            **EXPERTS,
            "head_dim": 64,
            "num_experts": 6,
            "moe_intermediate_size": 96,
            "norm_topk_prob": True,
        },
        module="qwen3_moe",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_text_are_as_close_to_float32_as_those_of_transformers(
    name: str, tmp_path: Path
) -> None:
    reference, rounded = _models(CASES[name], tmp_path)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(1, VOCABULARY, length).tolist() for length in (100, 37, 1, 16, 129)]
    params = SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, logprobs=TOP, prompt_logprobs=TOP
    )
    checkpoint = dataclasses.replace(open_checkpoint(tmp_path), has_text=False)
    with open_on_gpu(checkpoint, num_blocks=256, max_chunk_tokens=48, max_prefill_tokens=96) as llm:
        results = llm.generate(prompts, params, show_progress=False)
    ours, theirs = Distances(), Distances()
    for prompt, result in zip(prompts, results, strict=True):
        assert result.state is RequestState.COMPLETED, result.error
        _compare(prompt, result, reference, rounded, ours, theirs)
    print(f"{name}: weft {ours}; transformers in bfloat16 {theirs}")
    for share in (0.5, 0.9):
        assert ours.quantile(share) <= FACTOR * theirs.quantile(share) + FLOOR
    assert ours.share_chosen_right >= theirs.share_chosen_right - 0.1


class Distances:
    """The distance of an implementation from the reference: errors of logprobs, and how often the best token agrees."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.chosen_right: list[bool] = []

    def quantile(self, share: float) -> float:
        return float(np.quantile(self.errors, share))

    @property
    def share_chosen_right(self) -> float:
        return sum(self.chosen_right) / len(self.chosen_right)

    def __str__(self) -> str:
        agreed = f"{self.share_chosen_right:.0%} of the best tokens agree"
        return f"{self.quantile(0.5):.4f} (90%: {self.quantile(0.9):.4f}), {agreed}"


def _models(case: Case, folder: Path) -> tuple[Any, Any]:
    """The model in float32, with weights that bfloat16 represents exactly, and in bfloat16. Saved in `folder`."""
    reference = build_model(case)
    with torch.no_grad():
        if reference.config.tie_word_embeddings:
            # Without this the logits of a tied output layer are so large that no choice is close.
            reference.get_output_embeddings().weight.div_(reference.config.hidden_size**0.5)
        for parameter in reference.parameters():
            parameter.copy_(parameter.to(torch.bfloat16).float())
    reference.save_pretrained(folder)
    rounded = copy.deepcopy(reference)
    for parameter in rounded.parameters():  # the RoPE frequencies are buffers, and stay in float32
        parameter.data = parameter.data.to(torch.bfloat16)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return reference.to(device), rounded.to(device)


def _compare(
    prompt: list[int],
    result: GenerationResult,
    reference: Any,
    rounded: Any,
    ours: Distances,
    theirs: Distances,
) -> None:
    text = [*prompt, *result.tokens]
    truth, peer = _logprobs(reference, text), _logprobs(rounded, text)
    assert result.prompt_logprobs is not None and result.logprobs is not None
    for position, logprobs in enumerate([*result.prompt_logprobs[1:], *result.logprobs]):
        assert logprobs is not None
        tokens = [token for token, _ in logprobs.top]
        expected = truth[position, tokens]
        ours.errors.append(float(np.abs([value for _, value in logprobs.top] - expected).mean()))
        theirs.errors.append(float(np.abs(peer[position, tokens] - expected).mean()))
        best = int(truth[position].argmax())
        ours.chosen_right.append(tokens[0] == best)
        theirs.chosen_right.append(int(peer[position].argmax()) == best)
    # Greedy: the sampled token is the first of the top tokens.
    assert [logprobs.top[0][0] for logprobs in result.logprobs] == list(result.tokens)


def _logprobs(model: Any, text: list[int]) -> np.ndarray:
    with torch.no_grad():
        device = next(model.parameters()).device
        logits = model(torch.tensor([text], device=device), use_cache=False).logits[0]
        return torch.log_softmax(logits.double(), -1).cpu().numpy()
