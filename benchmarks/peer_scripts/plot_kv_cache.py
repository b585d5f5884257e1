"""Draws the chart of `python -m benchmarks kv-cache`: reads its JSON from standard input. Argument: the PNG file."""

import json
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"full": "#8d96a3", "8 bits": "#30638e", "4 bits": "#d1495b"}


def panels_of(report):
    """For each measured part: the title, the bars as (kind, value, label), and the required value by kind."""
    panels = []
    if found := report["admissions"]:
        bars = [(one["kind"], one["contexts"], str(one["contexts"])) for one in found]
        title = f"contexts of {found[0]['context']:,} tokens\nin {found[0]['memory'] / 2**20:,.0f} MiB"
        required = {
            kind: share * found[0]["contexts"] for kind, share in report["required_admissions"].items()
        }
        panels.append((title, bars, required))
    if found := report["readings"]:
        rises = [(one["kind"], 100 * one["difference"]["share"]) for one in found[1:]]
        bars = [(kind, rise, f"{rise:+.2f}%") for kind, rise in rises]
        panels.append(("perplexity above\nthe full cache's, %", bars, {"8 bits": 0.2, "4 bits": 1.5}))
    if found := report["retrievals"]:
        bars = [(one["kind"], one["found"], str(one["found"])) for one in found]
        required = {one["kind"]: 0.98 * one["expected"] for one in found[1:]}
        panels.append((f"facts found\nof {found[0]['asked']}", bars, required))
    if found := report["speeds"]:
        bars = [(one["kind"], one["tokens_per_second"], f"{one['tokens_per_second']:,.0f}") for one in found]
        title = f"tokens/s, batch {found[0]['batch']}\nover {found[0]['context']:,} tokens"
        panels.append((title, bars, {one["kind"]: found[0]["tokens_per_second"] for one in found[1:]}))
    return panels


def main(target):
    report = json.load(sys.stdin)
    panels = panels_of(report)
    figure, grid = plt.subplots(1, len(panels), figsize=(2.7 * len(panels), 3.4), squeeze=False)
    for panel, (title, bars, required) in zip(grid[0], panels, strict=True):
        drawn = panel.bar(
            range(len(bars)), [value for _, value, _ in bars], color=[COLOURS[kind] for kind, _, _ in bars]
        )
        panel.bar_label(drawn, [label for _, _, label in bars], fontsize=8)
        for position, (kind, _, _) in enumerate(bars):
            if kind in required:
                panel.hlines(
                    required[kind], position - 0.45, position + 0.45, colors="black", linestyles="dashed"
                )
        panel.set_title(title, fontsize=9)
        panel.set_xticks(range(len(bars)), [kind for kind, _, _ in bars], fontsize=8)
        panel.tick_params(axis="y", labelsize=7)
        panel.margins(y=0.15)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{report['model']}, {report['machine']}; dashed: the criterion", fontsize=7)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1])
