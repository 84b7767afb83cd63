"""Figures of many layers stay readable without colour: each line's name stands alone beside its end."""

import itertools
import random

import matplotlib
import pytest

from diagnostics import figures
from diagnostics.lines import label_ends, save, subplots, whole_ticks

DRAW = random.Random(0)
ENDS = {"spread": lambda n: [DRAW.random() for _ in range(n)], "equal": lambda n: [1.0] * n,
        "one far above": lambda n: [1e3] + [1.0 + i / 1e3 for i in range(n - 1)], "low": lambda n: [1e-3] * n}


def boxes(figure, axis):
    """Where the labels of a drawn figure are, by name."""
    figure.draw_without_rendering()
    return {text.get_text(): matplotlib.text.Text.get_window_extent(text) for text in axis.texts}


def alone(found):
    return not any(a.overlaps(b) for a, b in itertools.combinations(found.values(), 2))


@pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)
@pytest.mark.parametrize("n, scale", [(1, "linear"), (6, "log"), (24, "linear"), (24, "log")])
def test_labels_stand_alone_in_the_order_of_the_lines(n, ends, scale):
    figure, axis = subplots(figsize=(4, 2.2))  # a panel of compare.py --layers
    values = ends(n)
    for value in values:
        axis.plot([0, 1], [0.5, value])
    axis.set_yscale(scale)
    label_ends(axis, {str(i): (1, value) for i, value in enumerate(values)})
    found = boxes(figure, axis)
    assert found.keys() == {str(i) for i in range(n)} and alone(found)
    heights = [found[str(i)].y0 for i in sorted(range(n), key=values.__getitem__)]
    assert heights == sorted(heights)


@pytest.mark.parametrize("n", [12, 24])
def test_figure_11_names_every_layer(n):
    steps, kinds = [0, 500, 1000], ("W_Q", "W_K", "W_V", "W_O", "MLP_up", "MLP_down")
    norms = {kind: [[1 + s * DRAW.random() for _ in range(n)] for s in steps] for kind in kinds}
    logged = {kind: [[[], []] for _ in range(n)] for kind in kinds}
    logged["W_K"] = [[[0, 2000], [1.0, float(i)]] for i in range(n)]  # goes on beyond the checkpoints
    figure = figures._figure11(None, {"layer": 1, "figure11": {
        "norms": norms, "wq_norm_largest_head": norms["W_Q"], "logged": logged,
        "logged_largest_head": logged["W_Q"], "steps": steps}})
    for axis, kind in zip(figure.axes, kinds, strict=False):
        found = boxes(figure, axis)
        assert found.keys() == {str(i) for i in range(n)} and alone(found), kind
    assert {text.xy for text in figure.axes[1].texts} == {(2000, float(i)) for i in range(n)}


def test_what_is_counted_has_whole_ticks():
    figure, axes = subplots(2, figsize=(4, 4))
    axes[0].plot([1, 2, 3], [0.1, 0.2, 0.3])
    axes[1].plot([1, 2, 3], [0.1, 0.2, 0.3])
    axes[1].set_xticks([1.5])  # chosen, not counted
    whole_ticks(figure)
    assert all(tick == round(tick) for tick in axes[0].get_xticks()) and list(axes[1].get_xticks()) == [1.5]


def test_names_are_no_formulas(tmp_path):
    """A name between dollars that is no formula is drawn as it is; the numbers of a logarithmic axis are formulas."""
    figure, axis = subplots(figsize=(3, 3))
    axis.plot([1, 2], [1, 1e4], label=r"$\lr{$ 2")
    axis.set(yscale="log", title=r"run_$\no$", xlabel="$_{")
    axis.annotate(r"$\end$", (1, 1))
    axis.legend()
    figure.suptitle(r"a $\such{$")
    save(figure, tmp_path / "figure.png", dpi=50)
    numbers = [label for label in axis.get_yticklabels() if label.get_text()]
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert numbers and all("$" in label.get_text() and label.get_parse_math() for label in numbers)
