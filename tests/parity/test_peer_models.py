"""The converted models of `python -m benchmarks peers`: they must be the same model as the original."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from small_models import Reader, prompt

from benchmarks.peers_models import make_once, quantise_q4_0, write_folder, write_q4_0
from weft.loading.checkpoint import open_checkpoint
from weft.models.registry import build_decoder
from weft.ops.reference import ReferenceOps

gguf = pytest.importorskip("gguf")

VOCABULARY = 512
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS = 2, 64, 96, 4, 2
HEAD = HIDDEN // HEADS
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (KV_HEADS * HEAD, HIDDEN),
    "attn_v": (KV_HEADS * HEAD, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small Llama with tied embeddings, written by the gguf package."""
    path = tmp_path / "small.Q8_0.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<end>", "a", "b", "ab", *(f"token{index}" for index in range(4, VOCABULARY))])
    writer.add_token_types([3, *([1] * (VOCABULARY - 1))])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    random = np.random.default_rng(1)

    def add(name: str, shape: tuple[int, ...]) -> None:
        values = random.normal(size=shape).astype(np.float32) * (0.3 if len(shape) > 1 else 1.0)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    add("token_embd.weight", (VOCABULARY, HIDDEN))
    add("output_norm.weight", (HIDDEN,))
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", (HIDDEN,))
        add(f"blk.{layer}.ffn_norm.weight", (HIDDEN,))
        for name, shape in MATRICES.items():
            add(f"blk.{layer}.{name}.weight", shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(path: Path) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    ops = ReferenceOps(np.float64)
    decoder = build_decoder(checkpoint.layout, checkpoint.metadata, checkpoint.tensors, ops)
    tokens = [token % VOCABULARY for token in prompt()[:50]]
    return Reader(decoder, len(tokens), 16).feed(tokens)


def test_the_folder_of_safetensors_gives_the_logits_of_the_original_file(
    source: Path, tmp_path: Path
) -> None:
    write_folder(source, tmp_path / "folder")
    ours, theirs = logits_of(source), logits_of(tmp_path / "folder")
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(ours).max()


def test_transformers_reads_the_folder_and_its_tokenizer(source: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    write_folder(source, tmp_path / "folder")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    tokens = [token % VOCABULARY for token in prompt()[:50]]
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0].numpy()
    ours = logits_of(source)
    assert np.abs(ours - theirs).max() <= 1e-3 * np.abs(ours).max()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert tokenizer.decode([3, 7]) == "abtoken7"
    assert tokenizer.eos_token_id == 0


def test_the_q4_0_file_is_the_same_model_in_four_bits(source: Path, tmp_path: Path) -> None:
    write_q4_0(source, tmp_path / "small.Q4_0.gguf")
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "small.Q4_0.gguf")
    assert list(after.metadata) == list(before.metadata)
    assert after.vocabulary == before.vocabulary
    assert list(after.tensors) == list(before.tensors)
    for name, tensor in after.tensors.items():
        values, expected = tensor.to_float32(), before.tensors[name].to_float32()
        assert tensor.format_name == ("Q4_0" if values.ndim == 2 else "F32")
        groups = expected.reshape(-1, 32)
        step = np.abs(groups).max(axis=1, keepdims=True) / 8 if values.ndim == 2 else 0.0
        # Codes go from -8 to 7: a value opposite to the largest one may be off by a whole step, others by half a step.
        assert (np.abs(values.reshape(groups.shape) - groups) <= step * 1.01).all()


def test_q4_0_groups_are_those_of_the_gguf_package() -> None:
    random = np.random.default_rng(2)
    values = random.normal(size=(64, 96)).astype(np.float32)
    values[0, :32] = 0.0
    expected = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_0)
    assert (quantise_q4_0(values) == expected.reshape(-1, 18)).all()


def test_an_incomplete_target_is_made_again(tmp_path: Path) -> None:
    target = tmp_path / "models" / "made"

    def fail(partial: Path) -> None:
        partial.mkdir()
        (partial / "half").touch()
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        make_once(target, fail)
    assert not target.exists()
    make_once(target, lambda partial: partial.write_text("whole"))
    make_once(target, fail)
    assert target.read_text() == "whole"
