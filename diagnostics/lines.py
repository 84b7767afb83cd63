"""What figures share: how they are made and saved, lines that are told apart without colour, and axes that count."""

import io
import math
from itertools import accumulate
from pathlib import Path

from files import write_bytes

LEAST_GAP = 0.07  # of an axis' height, between two labels


def blank(figsize: tuple[float, float]):
    """A figure to draw on, for files alone. Not pyplot's, which keeps each one until it is closed and may want a
    screen: this one goes with its last reference, also where what was to be drawn is refused halfway."""
    from matplotlib.figure import Figure  # here, as it takes a while

    return Figure(figsize=figsize, layout="constrained")


def subplots(*shape: int, figsize: tuple[float, float], **options) -> tuple:
    """A `blank` figure and its axes, as pyplot's function of that name gives them."""
    figure = blank(figsize)
    return figure, figure.subplots(*shape, **options)


def save(figure, path: str | Path, dpi: int) -> None:
    """Writes a figure in the format that the name ends in, whole or not at all; names of runs, corpora and models may
    contain "$", as nothing but the numbers on an axis is set as a formula. Errors as `write_bytes`."""
    from matplotlib.text import Text

    numbers = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)
               for label in axis.get_ticklabels(which="both")}
    for text in set(figure.findobj(Text)) - numbers:
        text.set_parse_math(False)
    drawn = io.BytesIO()
    figure.savefig(drawn, format=Path(path).suffix[1:], dpi=dpi)
    write_bytes(path, drawn.getvalue())


def label_ends(axis, ends: dict[str, tuple[float, float]]) -> None:
    """Writes each name beside its line's last point (x, y), with the names pushed apart so that none covers another and
    a thin line to the point. Call it when all has been drawn; points that are not finite get no name."""
    axis.get_ylim()  # settles the limits
    to_axis = axis.transData + axis.transAxes.inverted()
    names = sorted((name for name in ends if math.isfinite(ends[name][1])), key=lambda name: ends[name][1])
    heights, n = [to_axis.transform(ends[name])[1] for name in names], len(names)
    gap = min(LEAST_GAP, 1 / max(1, n))
    # Apart by a gap if pushed up, and if pushed down; so they are in the middle of both, and within the axis.
    up = accumulate(heights, lambda below, height: max(below + gap, height))
    down = accumulate(reversed(heights), lambda above, height: min(above - gap, height))
    for i, (name, a, b) in enumerate(zip(names, up, reversed(list(down)), strict=True)):
        place = min(max((a + b) / 2, i * gap), 1 - (n - 1 - i) * gap)
        axis.annotate(name, ends[name], xytext=(1.03, place), textcoords="axes fraction", va="center",
                      fontsize=7 if gap == LEAST_GAP else 5,
                      arrowprops=dict(arrowstyle="-", color="0.5", linewidth=0.4, shrinkA=0, shrinkB=0))


def whole_ticks(figure) -> None:
    """No ticks between whole numbers on the x axes of a figure: steps, sequences, tokens, heads and features."""
    from matplotlib.ticker import AutoLocator

    for axis in figure.axes:
        if isinstance(locator := axis.xaxis.get_major_locator(), AutoLocator):
            locator.set_params(integer=True)
