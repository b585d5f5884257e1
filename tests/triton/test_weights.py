"""Loading tensors of model files to a device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from array_source import ArraySource
from weft.ops.triton import weights
from weft.ops.triton.device import Device
from weft.ops.triton.weights import Loader


@dataclass(frozen=True)
class StoredBytes(ArraySource):
    """A source with bytes in another format."""

    stored: np.ndarray | None = None
    kind: str = ""

    @property
    def format_name(self) -> str:
        return self.kind

    @property
    def raw(self) -> np.ndarray:
        assert self.stored is not None
        raw = self.stored.reshape(-1).view(np.uint8)
        raw.flags.writeable = False
        return raw


def in_bfloat16(values: np.ndarray) -> StoredBytes:
    stored = (values.view(np.uint32) >> 16).astype(np.uint16)
    rounded = (stored.astype(np.uint32) << 16).view(np.float32)
    return StoredBytes(rounded, stored=stored, kind="BF16")


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


@pytest.fixture(params=["at once", "in pieces"])
def loader(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> Loader:
    if request.param == "in pieces":
        monkeypatch.setattr(weights, "_STAGING_BYTES", 64)
    return Loader(device, torch.bfloat16)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_every_format_gives_the_same_numbers(kind: str, loader: Loader) -> None:
    values = in_bfloat16(draw(9, 6)).array
    source = {
        "F32": ArraySource(values),
        "F16": ArraySource(values.astype(np.float16)),
        "BF16": in_bfloat16(values),
        "Q8_0": StoredBytes(values, kind="Q8_0"),
    }[kind]
    expected = torch.from_numpy(source.array.astype(np.float32)).bfloat16()
    assert torch.equal(loader.stacked([source]).cpu(), expected)


def test_tensors_are_concatenated_by_rows(loader: Loader) -> None:
    first, second = in_bfloat16(draw(3, 4)), in_bfloat16(draw(5, 4))
    layer = loader.linear([first, second], [in_bfloat16(draw(3)), in_bfloat16(draw(5))])
    assert np.array_equal(layer.weight.float().cpu(), np.concatenate([first.array, second.array]))
    assert (layer.outputs, layer.inputs) == (8, 4)
    assert layer.bias is not None and layer.bias.shape == (8,)
    assert layer.nbytes == 8 * 4 * 2 + 8 * 2


@pytest.mark.parametrize("whole", [True, False])
def test_gate_and_up_of_an_expert_are_interleaved(whole: bool, loader: Loader) -> None:
    gate, up, down = (in_bfloat16(draw(2, *shape)).array for shape in ((3, 4), (3, 4), (4, 3)))

    def sources(stack: np.ndarray) -> list[StoredBytes]:
        return [in_bfloat16(stack)] if whole else [in_bfloat16(matrix.copy()) for matrix in stack]

    experts = loader.experts(sources(gate), sources(up + 1), sources(down))
    assert experts.gate_up.shape == (2, 6, 4)
    assert np.array_equal(experts.gate_up[:, 0::2].float().cpu(), in_bfloat16(gate).array)
    assert np.array_equal(experts.gate_up[:, 1::2].float().cpu(), in_bfloat16(up + 1).array)
    assert np.array_equal(experts.down.float().cpu(), down)


def test_a_norm_keeps_its_full_precision(loader: Loader) -> None:
    precise, stored = draw(7), in_bfloat16(draw(7))
    assert np.array_equal(loader.vector(ArraySource(precise), 0.0).cpu(), precise)
    assert np.array_equal(loader.vector(stored, 1.0).cpu(), stored.array + np.float32(1.0))
    assert loader.vector(stored, 0.0).dtype == torch.bfloat16


@dataclass(frozen=True)
class Drawn:
    name: str = "drawn"
    shape: tuple[int, ...] = (64, 32)
    seed: int = 3
    deviation: float = 0.5
    mean: float = 2.0
    fill_on_device: bool = True
    format_name: str = "BF16"


def test_random_numbers_are_drawn_on_the_device(loader: Loader) -> None:
    drawn = loader.stacked([Drawn()]).float()
    assert abs(float(drawn.mean()) - 2.0) < 0.1
    assert abs(float(drawn.std()) - 0.5) < 0.05
    assert torch.equal(drawn, loader.stacked([Drawn()]).float())
    assert not torch.equal(drawn, loader.stacked([Drawn(seed=4)]).float())
