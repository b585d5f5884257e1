"""`python -m benchmarks kernels`: times the linear layers of the default model, and compares them with the limits of
this machine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from benchmarks.machine_speed import SpeedProbe
from weft.bench.report import machine, print_json, print_line, print_table
from weft.errors import WeftError

_W4, _W8 = 0, 1
_LAYERS = (
    ("qkv", _W4, 960, 576),
    ("o", _W4, 576, 576),
    ("gate_up", _W4, 3072, 576),
    ("down", _W4, 576, 1536),
    ("head", _W8, 49152, 576),
)
_ROWS = (1, 8, 32, 128, 512)
# More than the processor caches hold, so that weights are read from memory as in a step.
_DATA_BYTES = 128 << 20
# Each figure is the best of the tries within this many seconds.
_SECONDS = 0.1


@dataclass(frozen=True)
class Timing:
    """One layer at one number of rows, and the fractions of memory bandwidth and arithmetic that it reaches."""

    instructions: str
    layer: str
    rows: int
    seconds: float
    operations_per_second: float
    bytes_per_second: float
    share_of_reading: float
    share_of_products: float | None
    """None if the instruction set has no instructions for byte products."""


def main(threads: int | None, json: bool) -> None:
    try:
        from weft import _kernels
    except ImportError:
        raise WeftError(
            "weft is installed without its C++ kernels, so there is nothing to measure: install a C++ compiler, then reinstall weft"
        ) from None
    before = _kernels.in_use()
    probe = SpeedProbe(threads, _DATA_BYTES)
    pool, data = probe.pool, probe.data
    read = probe.reading(_SECONDS)
    peaks: dict[str, float] = {}
    timings = []
    try:
        for name in _kernels.available():
            _kernels.use(name)
            peaks[name] = 2 * probe.products(_SECONDS)
            # Without instructions for byte products, many rows take seconds and show nothing new.
            counts = _ROWS if peaks[name] else _ROWS[:3]
            for (layer, layout, outputs, inputs), rows in itertools.product(_LAYERS, counts):
                size = _kernels.packed_bytes(layout, outputs, inputs)
                # With many rows arithmetic is the limit: fewer copies of the layer give the same result in less time.
                layers = data[: max(1, data.size // size // rows) * size]
                seconds = _kernels.measure_linear(layout, outputs, inputs, layers, rows, pool, _SECONDS)
                operations, traffic = 2 * rows * outputs * inputs / seconds, size / seconds
                share = operations / peaks[name] if peaks[name] else None
                timings.append(Timing(name, layer, rows, seconds, operations, traffic, traffic / read, share))
    finally:
        _kernels.use(before)
    if json:
        print_json(
            {
                "threads": pool.threads,
                "read_bytes_per_second": read,
                "peak_operations_per_second": peaks,
                "timings": timings,
                "machine": machine(),
            }
        )
        return
    print_line(machine())
    print_line(f"{pool.threads} threads read {read / 1e9:.1f} GB/s")
    for name, peak in peaks.items():
        print_table(
            f"{name}, {peak / 1e9:,.0f} GOP/s from registers" if peak else name,
            ("layer", "rows", "us", "GOP/s", "of peak", "GB/s", "of bandwidth"),
            [
                (
                    one.layer,
                    str(one.rows),
                    f"{1e6 * one.seconds:,.0f}",
                    f"{one.operations_per_second / 1e9:,.0f}",
                    "" if one.share_of_products is None else f"{one.share_of_products:.0%}",
                    f"{one.bytes_per_second / 1e9:.1f}",
                    f"{one.share_of_reading:.0%}",
                )
                for one in timings
                if one.instructions == name
            ],
        )
