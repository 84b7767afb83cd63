"""scripts/row_sums.py: its table and JSON, and what it refuses."""

import json

import pytest
import torch

from diagnostics.row_sums import exact_rows
from scripts import row_sums

SMALL = ["--shape", "1", "2", "64", "16", "--device=cpu"]


def test_table(tmp_path, capsys):
    out = tmp_path / "out" / "rows.json"
    arms = ["sdpa/math", "sdpa/flash", "flash_fa2", "sdpa/cudnn"]
    assert row_sums.main([*SMALL, "--scale", "1", "4", "--arms", *arms, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.err.count("row_sums: sdpa/cudnn does not run here: ") == 1 and "Traceback" not in said.err
    found = json.loads(out.read_text())
    assert [(row["arm"], row["scale"]) for row in found["rows"]] == [(arm, s) for s in (1, 4) for arm in arms[:3]]
    assert len(said.out.splitlines()) == 7 and found["shape"] == [1, 2, 64, 16] and found["hardware"]
    exact, torchs, ours = found["rows"][3:]
    assert exact["left_over"] < 1e-6 and exact["rows"] == 2 * 63
    for row in (torchs, ours):  # the same roundings, in another order
        assert 1e-3 < row["left_over"] < 2e-2 and row["cosine"] > 0.9 and row["larger"] > 0
        assert abs(row["mean"]) < 5 * row["mean_se"]


@pytest.mark.parametrize("flags, message", [
    (["--arms", "sdpa/fast"], "--arms sdpa/fast: torch's kernels are sdpa/math, sdpa/flash, sdpa/efficient, sdpa/cu"),
    (["--arms", "flash_fa3"], "--arms flash_fa3: "), (["--arms", "flash_fa2+delta=none"], "--arms flash_fa2+delta="),
    (["--arms", "flash_fa2+smooth_k=1"], "leave out smooth_k"),
    (["--arms", "standard+softcap=30"], "leave out softcap"),
    (["--scale", "0"], "--scale 0.0: each must be a number above 0"), (["--scale", "inf"], "--scale inf: "),
    (["--scale", "1e5"], "--shape 1 2 64 16 --scale 100000: the exact sizes of rows of dS have a root"),
    (["--scale", "1e30"], "a root mean square of 0, by which"),
    (["--shape", "1", "1", "2", "16"], "a standard error needs two rows"),
    (["--shape", "1", "1", "1", "16"], "--shape 1 1 1 16: "), (["--shape", "0", "1", "8", "16"], "--shape 0 1 8 16: "),
    (["--arms", "sdpa/cudnn"], "none of --arms sdpa/cudnn runs here; name others"),
    (["--device=cuda"], "--device=cuda: torch finds no GPU; use --device=cpu")])
def test_refused(flags, message, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert row_sums.main([*SMALL, *flags]) == 2
    assert message in capsys.readouterr().err


def test_the_exact_rows_are_made_once_for_all_arms(monkeypatch, capsys):
    """They are float64 and cost more than most kernels; and where they do not fit, that is what is told."""
    made = []
    monkeypatch.setattr(row_sums, "exact_rows", lambda *tensors: made.append(1) or exact_rows(*tensors))
    assert row_sums.main([*SMALL, "--scale", "1", "4", "--arms", "sdpa/math", "flash_fa2"]) == 0 and len(made) == 2

    def no_memory(*tensors):
        raise RuntimeError("out of memory\nmore")

    monkeypatch.setattr(row_sums, "exact_rows", no_memory)
    capsys.readouterr()
    assert row_sums.main(SMALL) == 2
    assert capsys.readouterr().err == ("row_sums: --shape 1 2 64 16: the exact rows, which are of all tokens at once, "
                                       "cannot be computed here: out of memory\n")


def test_cosine_of_small_numbers():
    """What a float64 kernel leaves over is 1e-15, and has a direction all the same."""
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            return 0 * q + exact_rows(q, k, v, q)[1] * (1 + 1e-12)

        @staticmethod
        def backward(ctx, do):
            rows = -1e-12 * (do * exact_rows(*given[:3], do)[1]).sum(-1, keepdim=True)
            return rows.expand_as(do) / 4, None, None

    given = [x.double() for x in row_sums.inputs([1, 2, 64, 16], 1.0)]
    found = row_sums.measure(Off.apply, *given)
    assert found["left_over"] < 1e-11 and found["cosine"] == pytest.approx(1, abs=1e-3)
