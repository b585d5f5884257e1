"""The kernels compile for a GPU on a machine without one: Triton includes its compilers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_every_kernel_of_a_forward_pass_and_of_sampling_compiles_for_hopper(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join([environment.get("PYTHONPATH", ""), str(HERE.parent)]).strip(
        os.pathsep
    )
    command = [sys.executable, str(HERE / "compile_for_gpu.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]
    assert "kernels compiled" in result.stdout
