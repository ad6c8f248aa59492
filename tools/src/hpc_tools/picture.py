"""The demo's picture: what each CTA reads under the dynamic schedule and under the static ones."""

import os
import pathlib

from .errors import InputError
from .schedules import TILE_TOKENS, Comparison

_COLORS = ("#1b7f5c", "#c8553d", "#d99a2b")
_INK, _FAINT = "#22262b", "#8a9099"


def check_path(path: pathlib.Path) -> None:
    """InputError where ``path`` cannot be written: asked before the work, not after it. Nothing is left behind.

    A file is opened to append, which asks the system itself (permissions, read-only file systems, name lengths) and
    changes nothing. Pipes and devices are not opened: that may wait for a reader.
    """
    if os.path.isdir(path) or not os.path.isdir(path.parent):
        reason = "is a folder" if os.path.isdir(path) else f"there is no folder {path.parent}"
        raise InputError(f"--plot: {path}: {reason}")
    existed = os.path.exists(path)
    if existed and not os.path.isfile(path):
        if not os.access(path, os.W_OK):
            raise InputError(f"--plot: {path}: cannot be written")
        return
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.resolve().unlink()  # resolved: of a link to no file yet, the link stays
    except OSError as error:
        raise InputError(f"--plot: {path}: {error.strerror or error}") from None


def draw(path: pathlib.Path, comparison: Comparison, subtitle: str) -> None:
    """Write a PNG of load per CTA, one panel a schedule on common axes, with the lower bound as a line.

    Raises InputError where ``path`` cannot be written.
    """
    # Imported here: it takes a second, and only this function needs it. The object interface needs no display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    schedules = comparison.schedules
    figure = Figure(figsize=(9, 2.0 + 1.55 * len(schedules)), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(schedules), 1, sharex=True, sharey=True)
    top = max(schedule.largest for schedule in schedules)
    for panel, schedule, color in zip(panels, schedules, _COLORS, strict=True):
        gap = 0.3 if len(schedule.loads) <= 200 else 0.0  # white edges would hide thinner bars
        panel.bar(range(len(schedule.loads)), schedule.loads, width=1.0, color=color, edgecolor="white", linewidth=gap)
        panel.axhline(comparison.lower_bound, color=_INK, linewidth=0.9, linestyle=(0, (4, 3)))
        panel.set_title(schedule.name, loc="left", fontsize=10, color=_INK, fontweight="bold", pad=4)
        panel.set_title(
            f"largest {schedule.largest}, mean {schedule.mean:.1f} tiles;  {schedule.pieces} pieces",
            loc="right",
            fontsize=9,
            color=_INK,
            pad=4,
        )
        panel.set_ylim(0, max(top, 1) * 1.08)
        panel.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        panel.tick_params(labelsize=8, color=_FAINT, labelcolor=_INK)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            panel.spines[side].set_color(_FAINT)
    panels[0].annotate(
        f"lower bound {comparison.lower_bound}",
        (len(schedules[0].loads) - 1, comparison.lower_bound),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=8,
        color=_INK,
    )
    panels[-1].set_xlabel("CTA", fontsize=9, color=_INK)
    panels[-1].set_xlim(-1, len(schedules[0].loads))
    figure.supylabel(f"tiles of {TILE_TOKENS} tokens read", x=0.012, y=0.46, fontsize=9, color=_INK)
    figure.suptitle("Decode attention: work of each CTA", x=0.065, ha="left", fontsize=13, color=_INK, y=0.985)
    figure.text(0.065, 0.93, subtitle, ha="left", va="top", fontsize=9, color=_FAINT)
    figure.subplots_adjust(left=0.065, right=0.985, top=0.84, bottom=0.085, hspace=0.42)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise InputError(f"--plot: {path}: {error.strerror or error}") from None
