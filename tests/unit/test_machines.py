"""`make test-machines` runs every test of equal bits as on other machines, or there is a reason why not."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
EVERY_TABLE = "its tests run on every table of kernels that this processor supports"
IN_THE_INTERPRETER = "slow in Triton's interpreter, whose products triton/test_interpreter.py tests; `make test-gpu` runs it on a GPU"
NOT_LISTED = {
    "engine/test_real_model_tiers.py": "minutes of the real model; parity/test_two_tier_program.py tests the same on small models",
    "kernels/test_attention.py": EVERY_TABLE,
    "kernels/test_attention_tiers.py": EVERY_TABLE,
    "kernels/test_linear.py": EVERY_TABLE,
    "kernels/test_rows.py": EVERY_TABLE,
    "kernels/test_sampler_kernel.py": EVERY_TABLE,
    "kernels/test_text_attention.py": EVERY_TABLE,
    "parity/test_default_embedder.py": "a minute of the real model; parity/test_text_models.py tests the same on small models",
    "parity/test_two_tier_program.py": EVERY_TABLE,
    "server/test_embeddings.py": "parity/test_text_models.py tests the same without a server",
    "triton/test_gpu_linear.py": IN_THE_INTERPRETER,
    "triton/test_mixture.py": IN_THE_INTERPRETER,
    "triton/test_program_batches.py": IN_THE_INTERPRETER,
    "triton/test_sampling.py": "noise is integer arithmetic",
}


def test_every_test_of_equal_bits_runs_as_on_other_machines() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    lists = re.findall(r"^(?:BY_NUMBERS|REAL_MODEL|BY_CORES_AND_SIGNALS) :=((?:.*\\\n)*.*)$", makefile, re.M)
    listed = {name.partition("::")[0] for names in lists for name in re.findall(r"\S+\.py\S*", names)}
    assert len(lists) == 3 and all((ROOT / "tests" / name).is_file() for name in listed)
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        if re.search(r"^ *(?:async )?def test_\w*(?:same_bits|bits_of)", path.read_text("utf-8"), re.M):
            found.add(path.relative_to(ROOT / "tests").as_posix())
    assert len(found) > 10
    missing = found - listed - NOT_LISTED.keys()
    assert not missing, f"list in the Makefile (BY_NUMBERS), or give a reason here: {sorted(missing)}"
    assert NOT_LISTED.keys() <= found - listed, "a reason is no longer needed"
