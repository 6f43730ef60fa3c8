"""The rows of a comparison as bars.

Must not know: targets, how figures came about.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib as mpl

from benchmarks.serving.summary import Figure, Row

_PANELS: tuple[tuple[str, Callable[[Row], Figure]], ...] = (
    ("output tokens per second", lambda row: row.tokens_per_s),
    ("TTFT p50, ms", lambda row: row.ttft_p50_ms),
    ("ITL p50, ms", lambda row: row.itl_p50_ms),
)


def draw(rows: Sequence[Row], title: str, file: Path) -> None:
    """A panel per measure, a group of bars per concurrency; whiskers from the least to the most of the rounds."""
    mpl.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.target for row in rows))
    levels = sorted({row.concurrency for row in rows})
    found = {(row.target, row.concurrency): row for row in rows}
    picture, panels = pyplot.subplots(1, len(_PANELS), figsize=(15, 4.5))
    width = 0.8 / len(names)
    for panel, (label, pick) in zip(panels, _PANELS, strict=True):
        for place, name in enumerate(names):
            here = [(at, pick(found[name, level])) for at, level in enumerate(levels) if (name, level) in found]
            whiskers = [[f.median - f.least for _, f in here], [f.most - f.median for _, f in here]]
            spots = [at + (place - (len(names) - 1) / 2) * width for at, _ in here]
            panel.bar(spots, [f.median for _, f in here], width, yerr=whiskers, label=name, error_kw={"lw": 0.8})
        panel.set_xticks(range(len(levels)), [f"c={level}" for level in levels])
        panel.set_title(label)
        panel.grid(axis="y", alpha=0.3)
    panels[0].legend(fontsize=8)
    picture.suptitle(title, fontsize=10)
    picture.tight_layout()
    picture.savefig(file, dpi=120)
    pyplot.close(picture)
