"""A diagnosis in words: one page of Markdown."""

from diagnostics.bias import MOST


def words(found: dict) -> str:
    """One page in Markdown that says what the numbers say, no more."""
    at, tie, share = f"layer {found['layer']}, head {found['head']}", found["ties"][-1], found["shares"][-1]
    three, step = found["figure3"], found["steps"][-1]
    norms = three["wq_norm"]
    others = sorted(norm for head, norm in enumerate(norms) if head != found["head"])
    error, five, six = found["coherence"]["error"][-1], found["figure5bc"], found["figure6"]
    tokens = found["coherence"]["between_tokens"][-1]
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
        f"its W_Q^T W_K is {three['qk_entropy'][found['head']]:.3g} nats. (figures 3, 11)",
        f"2. **Ties.** {tie['share']['one']:.1%} of rows have several P = 1 (in BF16), {tie['share']['exact']:.1%} "
        f"exactly equal maxima, {tie['share']['epsilon']:.1%} by the stabilizer's epsilon; at most {tie['most_ones']} "
        f"in a row. " + (f"{tie['places']['first_token']:.0%} of the tied rows have the first token among their "
                         f"maxima, which lie {tie['places']['mean_distance']:.0f} tokens back on average. "
                         if tie["places"]["rows"] else "") + "(figure 13)",
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
        f"{tokens['rank_one']['mean']:.2f} (PK {tokens['pk']['mean']:.2f}, X {tokens['x']['mean']:.2f}). Their "
        f"weighted sum has effective rank {error['effective_rank']:.1f}, with {error['top_share']:.0%} of its square "
        "in one direction. (figure 4)",
    ]
    if found["coherence"]["growth"]:
        growth = found["coherence"]["growth"][-1]
        lines.append(
            f"6. **Growth.** From step {growth['steps'][0]} to {growth['steps'][1]} this head's W_Q changed by "
            f"{growth['norm']:.3g} (Frobenius norm); the cosine of that change with the error of delta at its start is "
            f"{growth['cosine']:+.3f} (positive: along it), and {growth['subspace']:.1%} of its square lies on the "
            "error's first direction.")
    lines += ["", "Rounding of P V by ones in the row and the sign of V there, signed means:", "",
              "| ones | V at ones | entries | (PV)_lp - (PV)_hp | away from zero | O_lp - O_hp |",
              "|---|---|---|---|---|---|"]
    lines += [f"| {r['ones']}{'+' if r['ones'] == MOST else ''} | {r['sign']} | {r['entries']} | "
              f"{r['pv_error']:+.2e} | {r['away']:+.2e} | {r['o_error']:+.2e} |" for r in found["rounding"]]
    lines += ["", "The same rounding on synthetic rows: V in [-4, -2), one BF16 rounding of the sum:", "",
              "| ones | remainder | signed mean | mean size |", "|---|---|---|---|"]
    lines += [f"| {r['ones']} | {r['remainder']} | {r['error']:+.2e} | {r['error_size']:.2e} |"
              for r in found["synthetic"]]
    return "\n".join(lines) + "\n"


def _part(share: dict, name: str) -> str:
    return f"{share[name] / share['sum']:.0%}" if share["sum"] else f"{share[name]:+.1e}"
