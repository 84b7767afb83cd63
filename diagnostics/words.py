"""A diagnosis in words: one page of Markdown."""

import re
import textwrap

from diagnostics.bias import MOST


def words(found: dict) -> str:
    """One page in Markdown that says what the numbers say, no more."""
    at, tie, share = f"layer {found['layer']}, head {found['head']}", found["ties"][-1], found["shares"][-1]
    three, step = found["figure3"], found["steps"][-1]
    norms = three["wq_norm"]
    others = sorted(norm for head, norm in enumerate(norms) if head != found["head"])
    error, five, six = found["coherence"]["error"][-1], found["figure5bc"], found["figure6"]
    tokens, steps = found["coherence"]["between_tokens"][-1], (found["coherence"]["between_steps"] or [None])[-1]
    sums = found["figure5a"]
    middle = f"{others[len(others) // 2]:.3g} in the median of the layer's other heads" if others else "its only head"
    bias = share["sum"] / share["root"] if share["root"] else 0.0
    lines = [
        f"# Diagnosis of {found['name']}: {at}, step {step}", "",
        f"{found['sequences']} sequences of {found['tokens']} tokens at steps {', '.join(map(str, found['steps']))}. "
        f"Numerics: {found['attention']}. Low precision (lp) is the emulation of these, which equals the run's stored "
        f"O in {found['captured_equals_emulated'][-1]:.2%} of all values; high precision (hp) is float64 from the same "
        "scores on.", "",
        f"1. **Weights.** The spectral norm of this head's W_Q is {norms[found['head']]:.3g}, {middle}; the entropy of "
        f"its W_Q^T W_K is {three['qk_entropy'][found['head']]:.3g} nats. (figures 3, 11) At these steps the mean of "
        f"the keys that its scores are made of is {', '.join(f'{x:.3g}' for x in found['key_mean'])} times as long as "
        "the root mean square of what they differ from it by.",
        f"2. **Ties.** {tie['share']['one']:.1%} of rows have several P = 1 (in BF16), {tie['share']['exact']:.1%} "
        f"exactly equal maxima, {tie['share']['epsilon']:.1%} by the stabilizer's epsilon; at most {tie['most_ones']} "
        f"in a row. " + (f"{tie['places']['first_token']:.0%} of the tied rows have the first token among their "
                         f"maxima, which lie {tie['places']['mean_distance']:.0f} tokens back on average; the "
                         f"commonest maxima are of token {_tokens(tie)}. " if tie["places"]["rows"] else "")
        + "(figure 13)",
        f"3. **Rounding.** At token {five['token']} of sequence {five['sequence']}, O_lp - O_hp is at most "
        f"{max(map(abs, five['o_error'])):.2g} in size; V[:, {six['feature']}], the feature that adds most to delta, "
        f"is negative in {six['v_negative']:.0%} of the keys, and P = 1 at {len(six['ones'])} of them. (figures 5, 6)",
        f"4. **Delta.** sum_T (delta_lp - delta_hp) is {share['sum']:+.2e} over these sequences, "
        f"{sums['per_step'][-1]:+.2e} scaled to a step: {bias:+.1f} times what errors of these sizes without a "
        f"bias would add up to (beyond 3 either way: biased). "
        f"{_part(share, 'rows_tied')} of the sum come from rows with several P = 1, "
        f"{_part(share, 'rows_single')} from rows with one. By position, {_part(share, 'at_ones')} come from keys with "
        f"P = 1 and {_part(share, 'elsewhere')} from others; {_part(share, 'rest')} from tiles, division and the "
        f"rounding of O. Over all frames {sums['positive']:.0%} of the sequences have a positive sum. (figures 5a, 12)",
        f"5. **Coherence.** The matrices (PK)[T]^T X[T] of two tokens have a mean cosine of "
        f"{tokens['rank_one']['mean']:.2f} (PK {tokens['pk']['mean']:.2f}, X {tokens['x']['mean']:.2f})"
        + (f", of step {steps['steps'][0]} and step {steps['steps'][1]} {steps['rank_one']['mean']:.2f} (PK "
           f"{steps['pk']['mean']:.2f}, X {steps['x']['mean']:.2f})" if steps else "") + ". Their "
        f"weighted sum has effective rank {error['effective_rank']:.1f}, with {error['top_share']:.0%} of its square "
        "in one direction. (figure 4)",
    ]
    if growth := found["coherence"]["growth_in_all"]:
        norm = growth["spectral"]
        lines.append(
            f"6. **Growth.** From step {growth['steps'][0]} to {growth['steps'][1]} this head's W_Q changed by "
            f"{growth['norm']:.3g} (Frobenius norm). The cosine of that change with delta's error of dW_Q, summed over "
            f"the checkpoints before the last, is {growth['cosine']:+.3f} (positive: along it), and "
            f"{growth['subspace']:.1%} of its square lies on the error's first direction. Its spectral norm went from "
            f"{norm['before']:.3g} to {norm['after']:.3g}; the part of the change that lies along the error alone "
            f"takes it to {norm['along']:.3g}"
            + ("." if norm["share"] is None else f", {norm['share']:.0%} of the way."))
    if between := found["between"]:
        lines += ["", f"This run has {' and '.join(between)} between W_Q x and the scores, which coherence and growth "
                  "leave out: their matrices, errors and shares are not those of W_Q."]
    lines += ["", "Rounding of P V by ones in the row and the sign of V there, signed means:", "",
              "| ones | V at ones | entries | (PV)_lp - (PV)_hp | away from zero | O_lp - O_hp |",
              "|---|---|---|---|---|---|"]
    lines += [f"| {r['ones']}{'+' if r['ones'] == MOST else ''} | {r['sign']} | {r['entries']} | "
              f"{r['pv_error']:+.2e} | {r['away']:+.2e} | {r['o_error']:+.2e} |" for r in found["rounding"]]
    lines += ["", "By the sign of the remainder beside the ones: synthetic rows with V in [-4, -2) and one rounding of "
              "the sum, and this head's entries whose V at the ones has one sign, turned as if it were negative:", "",
              "| ones | remainder | synthetic mean | mean size | entries here | mean | mean size |",
              "|---|---|---|---|---|---|---|"]
    real = {(r["ones"], r["remainder"]): r for r in found["remainder"]}
    for r in found["synthetic"]:
        line = f"| {r['ones']} | {r['remainder']} | {r['error']:+.2e} | {r['error_size']:.2e} |"
        here = real.get((r["ones"], r["remainder"]))
        lines.append(line + (f" {here['entries']} | {here['error']:+.2e} | {here['error_size']:.2e} |" if here
                             else " 0 | | |"))
    return "\n".join(line if line.startswith(("|", "#")) else wrapped(line) for line in lines) + "\n"


def wrapped(line: str, width: int = 120) -> str:
    """A paragraph or an item in lines of at most `width`, none of which begins with a sign that Markdown would take for
    an item's."""
    kept = re.sub(r" ([-+*=] |\d+\. )", "\0\\1", line)
    indent = " " * len(re.match(r"(\d+\. )?", line).group())
    return textwrap.fill(kept, width, subsequent_indent=indent, break_long_words=False,
                         break_on_hyphens=False).replace("\0", " ")


def _tokens(tie: dict) -> str:
    """The token types that are most often a tied maximum, by id."""
    total = sum(tie["places"]["by_key"])
    return ", ".join(f"{token} ({n / total:.0%})" for token, n in tie["tokens"][:3])


def _part(share: dict, name: str) -> str:
    """A part of the sum in percent, or as it is where the sum is not more than chance: percent of nothing mislead."""
    return f"{share[name] / share['sum']:.0%}" if abs(share["sum"]) > 3 * share["root"] else f"{share[name]:+.1e}"
