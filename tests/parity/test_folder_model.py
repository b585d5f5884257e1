"""A model folder as on the Hugging Face hub (safetensors and tokenizer.json), from its path to generated text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from weft.cli.main import main
from weft.errors import ModelFileError
from weft.llm import LLM
from weft.request import FinishReason, SamplingParams

torch = pytest.importorskip("torch")

NEW_TOKENS = 24
TEXTS = ["The capital of France is", "日本の首都は", "def add(a, b):\n    return", "word " * 90]
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is the capital of Italy?"},
]


@pytest.fixture(scope="module")
def reference(
    default_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Any, Any]]:
    """A folder, its transformers model and its tokenizer: random bf16 weights, the default model's vocabulary."""
    from transformers import AutoTokenizer, GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(5)
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(default_model_path.parent, gguf_file=default_model_path.name)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    model = Qwen3ForCausalLM(config).eval().to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        eos_token_id=[tokenizer.eos_token_id, 7], temperature=0.6, top_p=0.9, do_sample=True
    )
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder, max_shard_size="4MB")
    tokenizer.save_pretrained(folder)
    assert (folder / "model.safetensors.index.json").exists(), "the weights are in several files"
    # Loaded from the files, because the conversion to bf16 above also rounded the RoPE frequencies of `model`.
    yield folder, Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


@pytest.fixture(scope="module")
def llm(reference: tuple[Path, Any, Any]) -> Iterator[LLM]:
    with LLM(str(reference[0]), num_blocks=128, max_running=4, max_chunk_tokens=32) as opened:
        yield opened


def greedy_text(reference: tuple[Path, Any, Any], prompt: list[int]) -> list[int]:
    _, model, _ = reference
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
        )
    return tokens[0, len(prompt) :].tolist()


def test_greedy_text_equals_transformers(reference: tuple[Path, Any, Any], llm: LLM) -> None:
    _, _, tokenizer = reference
    params = SamplingParams(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, temperature=0.0)
    for text, result in zip(TEXTS, llm.generate(TEXTS, params), strict=True):
        expected = greedy_text(reference, tokenizer(text)["input_ids"])
        assert list(result.tokens) == expected
        assert result.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_the_prompt_and_the_answer_of_a_conversation_equal_transformers(
    reference: tuple[Path, Any, Any], llm: LLM
) -> None:
    prompt = reference[2].apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)
    assert llm.text.require_chat_template().encode(TALK) == prompt
    params = SamplingParams(max_tokens=NEW_TOKENS, min_tokens=NEW_TOKENS, temperature=0.0)
    assert list(llm.chat(TALK, params).tokens) == greedy_text(reference, prompt)


def test_default_parameters_and_end_tokens_come_from_generation_config(
    reference: tuple[Path, Any, Any], llm: LLM
) -> None:
    assert llm.default_params() == SamplingParams(max_tokens=16, temperature=0.6, top_p=0.9)
    biased = SamplingParams(max_tokens=9, temperature=0.0, logit_bias={7: 100.0})
    result = llm.generate("anything", biased)[0]
    assert (result.tokens, result.finish_reason) == ((7,), FinishReason.END_OF_SEQUENCE)
    assert llm.memory.max_context == 256


def test_weights_keep_the_format_of_the_files(llm: LLM, reference: Any) -> None:
    """bf16 takes two bytes per value. Norms are float32, and the outputs of a layer are padded to a multiple of 16."""
    parameters = dict(reference[1].named_parameters())
    norms = sum(value.numel() for name, value in parameters.items() if "norm" in name)
    rest = sum(value.numel() for value in parameters.values()) - norms
    assert 4 * norms + 2 * rest <= llm.memory.weights <= 4 * norms + 2 * rest + (64 << 10)


def test_the_generate_command_accepts_a_folder(
    reference: tuple[Path, Any, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(reference[0])
    monkeypatch.setattr(
        "sys.argv", ["weft", "generate", "Hello", "-m", folder, "-n", "3", "-t", "0", "--output", "-"]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["usage"]["completion_tokens"] == 3


def test_an_unknown_architecture_is_rejected_with_the_list_of_known_ones(
    reference: tuple[Path, Any, Any], tmp_path: Path
) -> None:
    config = json.loads((reference[0] / "config.json").read_text())
    for source in reference[0].iterdir():
        (tmp_path / source.name).symlink_to(source)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(
        ModelFileError, match=r"'MambaForCausalLM' is not supported; weft supports .*LlamaForCausalLM"
    ):
        LLM(str(tmp_path))
