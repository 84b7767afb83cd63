"""The paper's figures from the numbers of a diagnosis and its scene; readable in black and white, axes with units."""

from pathlib import Path

from torch import Tensor

from diagnostics.coherence import rank_one
from diagnostics.lines import label_ends, save, subplots, whole_ticks
from diagnostics.precision import both
from diagnostics.scene import Scene

GREY, DARK = "0.7", "0.15"
LINES = ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))


def draw(scene: Scene, found: dict, folder: Path) -> list[Path]:
    """Writes figure3.png ... figure13.png and returns their paths."""
    paths = []
    for number, make in ((3, _figure3), (4, _figure4), (5, _figure5), (6, _figure6), (11, _figure11),
                         (12, _figure12), (13, _figure13)):
        figure = make(scene, found)
        figure.suptitle(f"{found['name']}: layer {found['layer']}, head {found['head']}", fontsize=9)
        whole_ticks(figure)
        paths.append(folder / f"figure{number}.png")
        save(figure, paths[-1], dpi=130)
    return paths


def _figure3(scene, found):
    figure, axis = subplots(figsize=(6, 3))
    values = found["figure3"]["wq_norm"]
    bars = axis.bar(range(len(values)), values, color=GREY, edgecolor="black")
    bars[found["head"]].set(hatch="///", facecolor="white")
    axis.bar_label(bars, fmt="%.2f", fontsize=7)
    axis.set(xlabel=f"head of layer {found['layer']} (from 0)", xticks=range(len(values)),
             ylabel=f"spectral norm of W_Q, step {found['figure3']['step']}")
    return figure


def _figure4(scene: Scene, found):
    four = found["figure4"]
    steps = [f.step for f in scene.frames]
    figure, grid = subplots(2, 3, figsize=(15, 7))  # wide: a column is an input feature
    for line, step, token, b, top in zip(grid, *(four[k] for k in ("steps", "tokens", "sequences", "features")),
                                         strict=True):
        frame = scene.frames[steps.index(step)]
        part = slice(b, b + 1)
        pair = both(frame.q[part], frame.k[part], frame.v[part], scene.spec)
        one = rank_one(pair.p, frame.k[part], frame.x[part])
        for axis, image, title, unit, y, x, marks in (
                (line[0], one.pk, "PK", "units of K", "token", "feature of the head", top["pk"]),
                (line[1], one.x, "X", "units of X, normalised", "token", "input feature", top["x"]),
                (line[2], one.matrix(token), f"(PK)[T]^T X[T], T = {token}", "units of K X", "feature of the head",
                 "input feature", top["x"])):
            _image(figure, axis, image, unit)
            axis.set_title(f"step {step}: {title}; largest columns {', '.join(map(str, marks))}", fontsize=9, pad=12)
            axis.set(xlabel=x, ylabel=y)
            axis.plot(marks, [1.02] * len(marks), "kv", transform=axis.get_xaxis_transform(), clip_on=False,
                      markersize=4)
    return figure


def _image(figure, axis, values: Tensor, unit: str):
    limit = max(values.abs().flatten().kthvalue(max(1, int(0.995 * values.numel()))).values.item(), 1e-300)
    shown = axis.imshow(values, cmap="gray", vmin=-limit, vmax=limit, aspect="auto")
    figure.colorbar(shown, ax=axis, label=unit, extend="both")


def _figure5(scene, found):
    a, bc = found["figure5a"], found["figure5bc"]
    figure, axes = subplots(3, 1, figsize=(7, 7))
    if len(a["steps"]) > 2:
        axes[0].plot(a["steps"], a["steps_cumulative"], "k.-")
        axes[0].set(xlabel="optimizer step, of the checkpoints taken")
    else:  # too few steps for a curve: over the sequences
        axes[0].plot(range(1, len(a["cumulative"]) + 1), a["cumulative"], "k.-")
        for i in range(1, len(a["step"])):
            if a["step"][i] != a["step"][i - 1]:
                axes[0].axvline(i + 0.5, color=GREY, linestyle="--", linewidth=0.8)
        axes[0].set(xlabel=f"sequence, of steps {' and '.join(map(str, a['steps']))} in turn (dashed: the next)")
    axes[0].set(ylabel="cumulative sum of\ndelta_lp - delta_hp (loss)")
    axes[0].axhline(0, color=GREY, linewidth=0.8)
    for axis, name, label in ((axes[1], "do", "dO (loss per unit of O)"),
                              (axes[2], "o_error", "O_lp - O_hp (units of O)")):
        axis.bar(range(len(bc[name])), bc[name], color=DARK)
        axis.axhline(0, color="black", linewidth=0.6)
        axis.set(xlabel=f"feature, at token {bc['token']}, step {bc['step']}", ylabel=label)
    return figure


def _figure6(scene, found):
    six = found["figure6"]
    low, high = six["zoom"]
    figure, axes = subplots(3, 1, figsize=(7, 7))
    axes[0].plot(six["v"], color=GREY, label=f"V[t, {six['feature']}]", linewidth=0.9)
    axes[0].plot(six["p"], "k-", linewidth=0.7, label=f"P[{six['token']}, t], 1 at the row maximum")
    axes[0].legend(fontsize=7)
    axes[0].set(ylabel="V (units of O) and P", xlabel="key position t")
    axes[2].set_title("around its largest step", fontsize=8)
    for axis, part in ((axes[1], slice(0, None)), (axes[2], slice(low, high + 1))):
        error = six["prefix_error"][part]
        positions = range(part.start, part.start + len(error))
        axis.step(positions, error, "k-", where="post", linewidth=0.9)
        marked = [t for t in six["ones"] if t in positions]
        axis.plot(marked, [six["prefix_error"][t] for t in marked], "o", color="black", markerfacecolor="white",
                  label="P rounds to 1")
        axis.axhline(0, color=GREY, linewidth=0.6)
        axis.set(ylabel="error of P V up to t\n(units of O)", xlabel="key position t")
    axes[1].legend(fontsize=7)
    return figure


def _figure11(scene, found):
    eleven = found["figure11"]
    kinds = eleven["norms"] | {"W_Q, largest head": eleven["wq_norm_largest_head"]}
    logged = eleven["logged"] | {"W_Q, largest head": eleven["logged_largest_head"]}
    figure, grid = subplots(2, -(-len(kinds) // 2), figsize=(12, 6))
    for axis in grid.flat[len(kinds):]:
        axis.axis("off")
    for axis, (kind, values) in zip(grid.flat, kinds.items(), strict=False):
        for layer in range(len(values[0])):
            worst = layer == found["layer"]
            style = dict(color="black" if worst else GREY, linewidth=1.8 if worst else 0.9, zorder=3 if worst else 2,
                         linestyle="-" if worst else LINES[layer % len(LINES)])
            if logged[kind][layer][0]:
                axis.plot(*logged[kind][layer], **style)
                axis.plot(eleven["steps"], [v[layer] for v in values], ".", color=style["color"])
            else:
                axis.plot(eleven["steps"], [v[layer] for v in values], marker=".", **style)
        axis.set(xlabel="optimizer step; numbers: layers", ylabel=f"spectral norm, {kind}")
        label_ends(axis, {str(layer): max((steps[-1], norms[-1]) for steps, norms in (
            (eleven["steps"], [v[layer] for v in values]), logged[kind][layer]) if steps)
            for layer in range(len(values[0]))})
    return figure


def _figure12(scene, found):
    twelve = found["figure12"]
    figure, axis = subplots(figsize=(8, 3))
    axis.bar(range(len(twelve["delta_error"])), twelve["delta_error"], color=DARK, width=1.0)
    axis.axhline(0, color="black", linewidth=0.6)
    axis.set(xlabel=f"token of sequence {twelve['sequence']}, step {twelve['step']}",
             ylabel="delta_lp - delta_hp (loss)")
    axis.set_title(f"sum {twelve['sum']:+.2e}", fontsize=9)
    return figure


def _figure13(scene, found):
    thirteen = found["figure13"]
    rows = thirteen["rows_a_sequence"]
    figure, axes = subplots(2, 1, figsize=(7, 5), sharex=True)
    axes[0].plot(*thirteen["val_loss"], "k.-")
    axes[0].set_ylabel("validation loss (nats/token)")
    for (steps, share), style, label in ((thirteen["tied_share"], "k-", "all heads of the layer, logged"),
                                         (thirteen["checkpoints"], "ks", "all heads of the layer, checkpoints"),
                                         (thirteen["head"], "k^", "this head, checkpoints")):
        axes[1].plot(steps, [s * rows for s in share], style, label=label, markerfacecolor="white")
    axes[1].set(xlabel="optimizer step", ylabel=f"rows with rs > 1, of the {rows}\nof a head and sequence")
    axes[1].legend(fontsize=7)
    return figure
