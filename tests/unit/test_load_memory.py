"""Memory during loading: the peak resident memory is little more than the size of the decoded weights."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="resident memory is read from /proc"
)

# Runs in a new process, since VmHWM is the peak over the whole life of a process. Like a decoder, it decodes every
# tensor into a slice of one array, which becomes resident only as it is filled.
LOAD = """
import json, sys
from pathlib import Path
import numpy as np
from weft.loading.gguf import read_gguf
from weft.loading.safetensors import read_safetensors

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

np.arange(8, dtype=np.float32).reshape(2, 4) @ np.ones((4, 1), np.float32)
before = resident("VmRSS")
path = sys.argv[1]
tensors = read_gguf(path).tensors if path.endswith(".gguf") else read_safetensors(path)
sizes = [int(np.prod(tensor.shape)) for tensor in tensors.values()]
weights = np.empty(sum(sizes), np.float32)
start = 0
for size, tensor in zip(sizes, tensors.values()):
    tensor.read_into(weights[start : start + size].reshape(tensor.shape))
    start += size
print(json.dumps({
    "weights": weights.nbytes, "peak": resident("VmHWM") - before, "final": resident("VmRSS") - before,
    "sum": float(weights.sum(dtype=np.float64)),
}))
"""


def load(path: Path) -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", LOAD, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def write_checkpoint(path: Path, dtype: str) -> float:
    """Writes 50 million weights, two thirds of them in one tensor, and returns their sum."""
    shapes = [(32768, 1024), *[(1024, 1024)] * 16]
    bytes_each = {"F32": 4, "BF16": 2}[dtype]
    header, start = {}, 0
    for index, shape in enumerate(shapes):
        end = start + shape[0] * shape[1] * bytes_each
        header[f"tensor.{index}"] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    row = np.arange(1024, dtype="<f4") % 64  # small integers: exact in both formats
    stored = row.tobytes() if dtype == "F32" else (row.view("<u4") >> 16).astype("<u2").tobytes()
    rows = sum(shape[0] for shape in shapes)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(rows // 1024):
            file.write(stored * 1024)
    return float(row.sum()) * rows


def assert_in_memory_once(measured: dict[str, float]) -> None:
    print({name: f"{value / 1e6:.1f} MB" for name, value in measured.items() if name != "sum"})
    assert measured["final"] > 0.99 * measured["weights"], "the measurement missed the weights"
    # The documented limit is 1.3. The test uses 1.1, to also catch a small quantised file that stays resident.
    assert measured["peak"] < 1.1 * measured["weights"]


def test_the_default_model_is_in_memory_once_while_it_loads(default_model_path: Path) -> None:
    assert_in_memory_once(load(default_model_path))


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_safetensors_checkpoint_is_in_memory_once_while_it_loads(tmp_path: Path, dtype: str) -> None:
    path = tmp_path / "model.safetensors"
    try:
        expected = write_checkpoint(path, dtype)
        measured = load(path)
    finally:
        path.unlink(missing_ok=True)
    assert measured["weights"] > 200e6
    assert measured["sum"] == expected
    assert_in_memory_once(measured)
