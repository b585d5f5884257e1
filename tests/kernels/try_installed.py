"""Checks an installed wheel (run by cibuildwheel and CI): its kernels load, and each instruction set unpacks weights
unchanged."""

import numpy as np

from weft import _kernels

OUTPUTS, INPUTS = 21, 70


def main() -> None:
    values = np.random.default_rng(0).standard_normal((OUTPUTS, INPUTS)).astype(np.float32)
    layout = _kernels.layout_of("F32")
    strips = np.empty(_kernels.packed_bytes(layout, OUTPUTS, INPUTS), np.uint8)
    _kernels.pack("F32", values.view(np.uint8).reshape(-1), INPUTS, layout, 0, OUTPUTS, strips)
    for name in _kernels.available():
        _kernels.use(name)
        rows = _kernels.unpack_rows(layout, OUTPUTS, INPUTS, strips, np.arange(OUTPUTS))
        assert np.array_equal(rows, values), f"{name}: unpacked weights differ"
    print(f"kernels of {_kernels.__file__}: {', '.join(_kernels.available())}")


if __name__ == "__main__":
    main()
