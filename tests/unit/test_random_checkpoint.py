"""The random checkpoint: it has all tensors of a decoder, every read method agrees, activations stay finite."""

from __future__ import annotations

import numpy as np
import pytest

from weft.errors import InvalidRequestError, ModelFileError
from weft.llm import LLM
from weft.loading.decoding import decode_into
from weft.loading.formats import BF16
from weft.loading.random_checkpoint import RandomSource, random_checkpoint
from weft.models.registry import build_decoder
from weft.ops.base import StepIndices
from weft.ops.reference import ReferenceOps
from weft.request import FinishReason, SamplingParams

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 301,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def source(seed: int = 1) -> RandomSource:
    return RandomSource("a tensor", (200, 50), seed, deviation=0.5, mean=1.0)


def test_every_read_method_gives_the_same_numbers() -> None:
    values = source().to_float32()
    filled, decoded = np.empty((200, 50), np.float64), np.empty((200, 50), np.float32)
    source().read_into(filled)
    decode_into(source().raw, BF16, decoded)
    assert np.array_equal(filled, values)
    assert np.array_equal(decoded, values)
    assert np.array_equal(source().rows(np.array([7, 3])), values[[7, 3]])


def test_the_numbers_have_the_given_mean_and_deviation_and_depend_on_the_seed() -> None:
    values = source().to_float32()
    assert values.mean() == pytest.approx(1.0, abs=0.05)
    assert values.std() == pytest.approx(0.5, abs=0.05)
    assert not np.array_equal(source(2).to_float32(), values)


def test_the_tensors_of_two_layers_differ() -> None:
    tensors = random_checkpoint({"model_type": "llama", **SHAPE}).tensors
    layers = [tensors[f"model.layers.{layer}.self_attn.q_proj.weight"].to_float32() for layer in (0, 1)]
    assert not np.array_equal(*layers)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_decoder_uses_all_tensors_and_its_activations_stay_finite(model_type: str, tied: bool) -> None:
    checkpoint = random_checkpoint({"model_type": model_type, **SHAPE, "tie_word_embeddings": tied})
    decoder = build_decoder(
        checkpoint.layout, checkpoint.metadata, checkpoint.tensors, ReferenceOps(np.float32)
    )
    positions = np.arange(16)
    rows = np.array([0, 16])
    step = StepIndices(positions, positions, positions, rows, rows[1:], np.zeros((1, 1), int), positions)
    logits = decoder.logits(decoder.forward(step, decoder.new_cache(1, 16)))
    assert 0.5 < logits.std() < 2


def test_an_unsupported_architecture_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"mamba.*llama, qwen2, qwen3"):
        random_checkpoint({"model_type": "mamba"})


def test_a_model_without_a_tokenizer_answers_token_ids_with_token_ids() -> None:
    checkpoint = random_checkpoint({"model_type": "qwen3", **SHAPE})
    with LLM(checkpoint, num_blocks=32) as llm:
        results = llm.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
        assert [len(result.tokens) for result in results] == [9, 9]
        assert {result.finish_reason for result in results} == {FinishReason.LENGTH}
        assert {result.text for result in results} == {""}
        for wrong in ("words", [1, 2]):
            with pytest.raises(InvalidRequestError, match="has no tokenizer; pass prompts as token ids"):
                llm.generate([wrong], SamplingParams(stop=("end",)))
