"""What preconditions.py measured, as the paper's figures 8 and 9 and one page of Markdown."""

from pathlib import Path

import torch

from diagnostics.lines import blank, save, subplots, whole_ticks
from diagnostics.preconditions import ALIKE
from diagnostics.words import wrapped


def draw(found: dict, shown: dict, out: Path) -> None:
    """figure8.png and figure9.png; found as in preconditions.json, shown: tensors of what is drawn."""
    for name, make in (("figure8", _figure8), ("figure9", _figure9)):
        figure = make(found, shown)
        whole_ticks(figure)
        save(figure, out / f"{name}.png", dpi=130)


def _figure8(found, shown):
    eight = found["figure8"]
    figure, axes = subplots(1, 2, figsize=(11, 3.8), sharey=True)
    for n, axis in enumerate(axes):
        matrix = torch.outer(shown["pk"][n], shown["x"][n])
        limit = matrix.abs().max().item() or 1.0
        image = axis.imshow(matrix, cmap="gray", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        figure.colorbar(image, ax=axis, label="(PK)[T, i] X[T, j]")
        token = eight["tokens"][n]
        axis.set_title(f"token {token}, {found['pieces'][token]!r}", fontsize=9)
        axis.set(xlabel="input feature j", ylabel="feature i of the head")
        axis.plot(list(eight["columns"]), [1.03] * len(eight["columns"]), "kv", clip_on=False, markersize=5,
                  transform=axis.get_xaxis_transform())
    columns = ", ".join(f"{j}: {cosine:.6f}" for j, cosine in eight["columns"].items())
    figure.suptitle(f"{found['model']}, layer {eight['layer']}, head {eight['head']}: cosine {eight['matrix']:.6f}; "
                    f"of columns {columns}", fontsize=9)
    return figure


def _figure9(found, shown):
    examples = shown["examples"]
    wide = 1 + -(-len(examples) // 2)
    figure = blank(figsize=(3.6 * wide, 5))
    grid = figure.add_gridspec(2, wide)
    axis = figure.add_subplot(grid[:, 0])
    share = torch.tensor([layer["one"] for layer in found["counts"]]).double() / found["tokens"]
    image = axis.imshow(share, cmap="gray_r", vmin=0, vmax=max(share.max().item(), 1e-9), aspect="auto",
                        interpolation="nearest")
    figure.colorbar(image, ax=axis, label="share of rows with several P = 1")
    axis.set(xlabel="query head", ylabel="layer")
    axis.yaxis.get_major_locator().set_params(integer=True)
    for n, (layer, head, query, maxima, row) in enumerate(examples):
        axis = figure.add_subplot(grid[n % 2, 1 + n // 2])
        axis.vlines(range(len(row)), 0, row, color="black", linewidth=0.8)
        axis.set_title(f"layer {layer}, head {head}, query {query}: {maxima} maxima", fontsize=8)
        axis.set(xlabel="key position", ylabel="P, 1 at the maximum", ylim=(0, 1.05))
    figure.suptitle(found["model"], fontsize=9)
    return figure


def page(found: dict) -> str:
    """One page in Markdown that says what the numbers say."""
    eight, rows, heads = found["figure8"], found["tokens"] - 1, found["heads"]
    sums = {rule: sum(sum(layer[rule]) for layer in found["counts"]) for rule in found["counts"][0]}
    ones = sorted(((n, i, h) for i, layer in enumerate(found["counts"]) for h, n in enumerate(layer["one"]) if n),
                  reverse=True)
    sinks = sum(keys[0] == 0 for *_, keys in found["rows"])
    alike = sorted(share for layer in found["similarity"] for share in layer["columns_next_alike"])
    best = found["similarity"][eight["layer"]]["matrices_next"][eight["head"]]
    means = [max((x == x, x, h) for h, x in enumerate(layer)) for layer in found["key_mean"]]  # NaN: keys are 0
    longest = max(range(len(means)), key=means.__getitem__)
    tokens = " and ".join(f"{t} ({found['pieces'][t]!r})" for t in eight["tokens"])
    columns = ", ".join(f"{j}: {cosine:.6f}" for j, cosine in eight["columns"].items())
    lines = [
        f"# Preconditions in {found['model']}", "",
        f"{found['layers']} layers, {heads} query heads on {found['key_heads']} key heads, {found['tokens']} tokens of "
        f"{found['text']}, model in {found['dtype']}, scores rounded to BF16.", "",
        f"1. **Repeated maxima** (figure 9). Of {rows * found['layers'] * heads} rows with two keys or more, "
        f"{sums['one']} have several P = 1 in BF16, {sums['exact']} exactly equal maxima, {sums['epsilon']} maxima "
        f"within epsilon = {found['epsilon']:g}."]
    if ones:
        lines[-1] += (f" In {sinks / len(found['rows']):.0%} of them the first token is a maximum. Most are in " + ", "
                      .join(f"layer {i} head {h} ({n} of {rows})" for n, i, h in ones[:5]) + ".")
    lines += [
        f"2. **Alike directions** (figure 8). In the median head {alike[len(alike) // 2]:.0%} of neighbouring tokens "
        f"have columns of (PK)[T]^T X[T] with a cosine above {ALIKE} in size. Layer {eight['layer']}, head "
        f"{eight['head']} has the most alike matrices: their mean cosine between neighbours is {best:.4f}; that of "
        f"tokens {tokens} is {eight['matrix']:.6f}, "
        f"that of their columns {columns}.",
        f"3. **Mean key.** In layer {longest}, key head {means[longest][2]}, it is {means[longest][1]:.3g} times as "
        "long as the root mean square of what keys differ from it by; the largest of each layer, from layer 0 on: "
        f"{', '.join(f'{x:.3g}' for _, x, _ in means)}. It adds the same to all scores of a row, so softmax does not "
        "see it; delta's rounding error pushes queries along it.", "",
        "Column j of (PK)[T]^T X[T] is PK[T] X[T, j]: up to its sign, its cosine between two tokens is that of their "
        "PK, whichever column is shown. The cosine of the whole matrices is that times the cosine of their X.", "",
        "![figure 8](figure8.png)", "", "![figure 9](figure9.png)", ""]
    return "\n".join(line if line.startswith(("#", "!")) else wrapped(line) for line in lines)
