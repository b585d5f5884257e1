"""Draws the bar chart of `python -m benchmarks peers`: reads JSON from standard input. Argument: the PNG file."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OURS = "#d1495b"
OTHERS = ("#30638e", "#5b8db8", "#9dbfdc", "#003d5b", "#edae49", "#00798c", "#8d96a3", "#b8b8b8")


def main(target):
    chart = json.load(sys.stdin)
    columns = chart["columns"]
    across = min(3, len(columns))
    down = -(-len(columns) // across)
    figure, grid = plt.subplots(down, across, figsize=(3.6 * across, 2.9 * down + 0.9), squeeze=False)
    panels = list(grid.flat)
    for panel in panels[len(columns) :]:
        panel.set_visible(False)
    colours = {name: OURS if name == "weft" else None for name in chart["engines"]}
    rest = iter(OTHERS * len(colours))
    colours = {name: colour or next(rest) for name, colour in colours.items()}
    for panel, column in zip(panels, columns, strict=False):
        bars = column["bars"]
        positions = range(len(bars))
        drawn = panel.bar(
            positions,
            [bar["value"] for bar in bars],
            color=[colours[bar["engine"]] for bar in bars],
            hatch=["//" if bar["is_disturbed"] else "" for bar in bars],
            edgecolor="white",
        )
        panel.bar_label(drawn, [f"{bar['value']:,.0f}" for bar in bars], fontsize=7)
        panel.set_title(column["name"], fontsize=10)
        panel.set_xticks([])
        panel.tick_params(axis="y", labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    for first in grid[:, 0]:
        first.set_ylabel("output tokens/s, prefill included", fontsize=8)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in colours.values()]
    labels = list(colours)
    if any(bar["is_disturbed"] for column in columns for bar in column["bars"]):
        handles.append(plt.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="grey", hatch="//"))
        labels.append("disturbed by other load")
    figure.legend(handles, labels, loc="lower center", ncols=3, fontsize=8, frameon=False)
    figure.suptitle(chart["title"], fontsize=9)
    figure.tight_layout(rect=(0, 0.8 / figure.get_figheight(), 1, 1))
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1])
