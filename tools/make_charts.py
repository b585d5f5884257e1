"""Draws the charts of docs/performance.md and of the README from the figures written here: `make charts`.

The figures are those of the tables in docs/performance.md and docs/guide/kv-cache.md. Change both together.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

FOLDER = Path(__file__).parents[1] / "docs" / "charts"
WEFT, PEER, OTHER = "#3f51b5", "#b0b4c4", "#d8a657"

# Two cores of an AMD EPYC (Zen 4), AVX-512 with VNNI, 2026-11-16: tokens/s of weft divided by those of the peer.
ZEN4 = (
    ("W1, llama.cpp Q4_0", 3.3),
    ("W1, llama.cpp, the same file", 6.2),
    ("W8, llama.cpp Q4_0", 4.4),
    ("W8, OpenVINO", 1.97),
    ("W32, OpenVINO", 2.01),
    ("Wmix, OpenVINO", 2.13),
    ("Wshare, vLLM", 4.06),
    ("Wshare, OpenVINO", 7.2),
    ("Wshare-warm, OpenVINO", 2.48),
)
# Two cores, AVX2 without AVX-512: output tokens/s. llama.cpp made 80 to 97 on W1; the chart shows the better figure.
AVX2 = {
    "W1": (49, 97, 208),
    "W8": (128, 127, 307),
    "W32": (171, 133, 386),
    "Wmix": (117, 84, 237),
    "Wshare": (37, 30, 274),
    "Wshare-warm": (165, 80, 311),
}
# NVIDIA H200, 2026-11-16: tokens/s of weft divided by those of vLLM 0.24.0, for the shapes 0.6B and 8B.
H200 = {
    "single": (3.50, 1.31),
    "batch8": (2.44, 1.25),
    "batch64": (1.54, 1.14),
    "batch256": (1.40, 1.14),
    "offline256": (1.14, 1.07),
    "prefill32x2048": (1.18, 1.05),
    "long16x3500": (1.19, 1.06),
}
# NVIDIA H200, 2026-11-15, SmolLM2-135M: fractions of the figure of the full-precision cache.
TWO_TIER = {
    "contexts of 4,096 tokens\nin the same memory": (1.81, 3.12),
    "decode speed, 16 contexts\nof 4,096 tokens": (1.15, 1.23),
}


def main() -> None:
    pyplot.rcParams.update(
        {"svg.hashsalt": "weft", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
    )
    FOLDER.mkdir(exist_ok=True)
    _save("zen4", _zen4)
    _save("avx2", _avx2)
    _save("h200", _h200)
    _save("two-tier", _two_tier)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.4), width_ratios=(1.1, 1))
    names = (
        "W1, llama.cpp Q4_0",
        "W8, OpenVINO",
        "W32, OpenVINO",
        "Wmix, OpenVINO",
        "Wshare, vLLM",
        "Wshare-warm, OpenVINO",
    )
    _ratios(left, [one for one in ZEN4 if one[0] in names], "Two CPU cores (Zen 4): times the best peer")
    _h200(right)
    right.set_title("NVIDIA H200: times vLLM 0.24", fontsize=10, pad=12)
    _write(figure, "summary")


def _zen4(axes: Any) -> None:
    _ratios(axes, ZEN4, "Output tokens/s of weft over those of the peer; two cores, Zen 4")


def _avx2(axes: Any) -> None:
    for index, (name, colour) in enumerate((("OpenVINO", OTHER), ("llama.cpp Q4_0", PEER), ("weft", WEFT))):
        places = [place + 0.27 * (index - 1) for place in range(len(AVX2))]
        bars = axes.bar(places, [one[index] for one in AVX2.values()], 0.25, label=name, color=colour)
        axes.bar_label(bars, fontsize=8)
    axes.set_xticks(range(len(AVX2)), AVX2)
    axes.set_title("Output tokens/s; two cores with AVX2", fontsize=10, pad=12)
    axes.legend(frameon=False)


def _h200(axes: Any) -> None:
    for index, (name, colour) in enumerate((("0.6B shape", WEFT), ("8B shape", PEER))):
        places = [place + 0.2 * (2 * index - 1) for place in range(len(H200))]
        bars = axes.bar(places, [one[index] for one in H200.values()], 0.38, label=name, color=colour)
        axes.bar_label(bars, fmt="%.2f", fontsize=6.5)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(H200)), H200, rotation=25, ha="right", fontsize=8)
    axes.set_title("Tokens/s of weft over those of vLLM 0.24.0; NVIDIA H200, bf16", fontsize=10, pad=12)
    axes.legend(frameon=False)


def _two_tier(axes: Any) -> None:
    for index, (name, colour) in enumerate((("8 bits", PEER), ("4 bits", WEFT))):
        places = [place + 0.2 * (2 * index - 1) for place in range(len(TWO_TIER))]
        bars = axes.bar(places, [one[index] for one in TWO_TIER.values()], 0.38, label=name, color=colour)
        axes.bar_label(bars, fmt="%.2f")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(TWO_TIER)), TWO_TIER)
    axes.set_title("Two tiers over the full cache; NVIDIA H200, SmolLM2-135M", fontsize=10, pad=12)
    axes.legend(frameon=False)


def _ratios(axes: Any, ratios: Any, title: str) -> None:
    names = [name for name, _ in reversed(ratios)]
    bars = axes.barh(names, [ratio for _, ratio in reversed(ratios)], color=WEFT)
    axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_title(title, fontsize=10, pad=12)


def _save(name: str, draw: Any) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 3.8))
    draw(axes)
    _write(figure, name)


def _write(figure: Any, name: str) -> None:
    figure.tight_layout()
    figure.savefig(FOLDER / f"{name}.svg", metadata={"Date": None}, facecolor="white")
    pyplot.close(figure)


if __name__ == "__main__":
    main()
