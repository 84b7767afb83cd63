"""delta_bias.py on a tiny run."""

import dataclasses
import json
import math

import pytest
import torch

from attention import AttentionSpec
from attention.op import smooth_keys
from replay.switches import Switch
from scripts import delta_bias
from tests.scripts.test_diagnose import flags, run  # noqa: F401  the fixtures


def test_a_run(run, capsys):  # noqa: F811
    """Both checkpoints, every head; more sequences than a step has come from the steps that follow, or, as the run
    ends, the last ones. A head given twice is one."""
    assert delta_bias.main([str(run), "--steps", "4:8", "--sequences", "12", "--device", "cpu"]) == 0
    rows = json.loads((run / "delta_bias.json").read_text())["rows"]
    assert [(r["step"], r["layer"], r["head"]) for r in rows] == [(4, 1, 0), (4, 1, 1), (8, 1, 0), (8, 1, 1)]
    assert all(r["sequences"] == 12 and r["wq_norm"] > 0 and r["sum_se"] > 0 and 0 <= r["tied"] < 1 for r in rows)
    assert all(r["push_t"] == pytest.approx(r["push"] / r["push_se"]) for r in rows)
    assert "written to" in capsys.readouterr().out
    argv = [str(run), "--steps", "12", "--sequences", "12", "--heads", "1", "1", "--device", "cpu"]
    assert delta_bias.main(argv) == 0
    (last,) = json.loads((run / "delta_bias.json").read_text())["rows"]
    assert (last["step"], last["sequences"]) == (12, 12)
    assert abs(last["error_cosine"]) <= 1
    capsys.readouterr()
    assert delta_bias.main([str(run), "--sequences", "8", "--device", "cpu"]) == 0  # of one step
    assert all(r["error_cosine"] is r["gradient_cosine_size"] is None
               for r in json.loads((run / "delta_bias.json").read_text())["rows"])
    assert all(line.split()[-2:] == ["-", "-"] for line in capsys.readouterr().out.splitlines()[1:-1])


def test_other_numerics_on_the_same_weights(run):  # noqa: F811
    """The run's own are "run"; FP32 attention has no error, and delta = rowsum(dP P) a smaller one than dO O."""
    argv = [str(run), "--steps", "8", "--sequences", "12", "--heads", "1", "--device", "cpu", "--numerics", "run",
            "delta=dp_p", "flash_fp32", "run"]
    assert delta_bias.main(argv) == 0
    rows = {r["numerics"]: r for r in json.loads((run / "delta_bias.json").read_text())["rows"]}
    assert list(rows) == ["run", "delta=dp_p", "flash_fp32"]
    found = json.loads((run / "delta_bias.json").read_text())
    assert found["seed"] == 3 and found["git_commit"] and found["data"] and found["device_name"] == "CPU"
    assert rows["flash_fp32"]["error_share"] < 1e-3 < rows["run"]["error_share"]
    assert abs(rows["delta=dp_p"]["row_sum"]) < abs(rows["run"]["row_sum"])
    figure = run / "delta_bias.png"
    drawn = figure.read_bytes()
    figure.unlink()
    assert delta_bias.main([str(run / "delta_bias.json"), "--draw"]) == 0 and figure.read_bytes() == drawn


def test_files_that_cannot_be_drawn(tmp_path, capsys):
    """What is none of the script's, and what is from before it measured what is drawn, with how to measure that."""
    other, old = tmp_path / "other.json", tmp_path / "old.json"
    other.write_text('{"rows": []}')
    old.write_text(json.dumps({"rows": [{"step": step, "layer": 1, "head": head, "sequences": 128, "push": 1e-6}
                                        for step in (500, 1000) for head in (0, 3)]}))
    for file, words in ((other, f"{other} is no --out of this script"), (old, f"{old} is from before this script "
            "measured error_share, so there is nothing to draw; measure the run again: scripts/delta_bias.py RUN "
            f"--steps 500,1000 --layer 1 --heads 0 3 --sequences 128 --out {old}\n")):
        assert delta_bias.main([str(file), "--draw"]) == 2
        assert words in capsys.readouterr().err
    for flag, value in (("out", "x.json"), ("steps", "4")):
        assert delta_bias.main([str(old), "--draw", f"--{flag}", value]) == 2
        assert f"--{flag}={value} changes nothing of a figure" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))


def test_cosines_tell_a_bias_from_a_direction_whose_sign_changes():
    gradient, direction = torch.eye(3, dtype=torch.float64), torch.ones(3, 3, dtype=torch.float64)
    for signs, cosine in [((1, 1, 1, 1), 1.0), ((1, -1, 1, -1), -1 / 3)]:
        found = delta_bias.by_step([torch.stack([gradient, sign * direction]) for sign in signs])
        assert found == pytest.approx({"error_share": 3.0, "error_rank_one": 1.0, "error_cosine": cosine,
                                       "error_cosine_size": 1.0, "gradient_cosine": 1.0, "gradient_cosine_size": 1.0})


def test_what_has_no_cosine_is_told_from_what_is_not_finite():
    """One step, or errors of 0, which have no direction, against one that is nan."""
    def cosines(*sizes):
        one = torch.eye(3, dtype=torch.float64)
        found = delta_bias.by_step([torch.stack([one, size * one]) for size in sizes])
        return [found[f"{name}_cosine{end}"] for name in ("error", "gradient") for end in ("", "_size")]

    assert cosines(1) == [None] * 4
    assert cosines(0, 0, 1) == pytest.approx([None, None, 1, 1])
    assert cosines(0, -1, 1) == pytest.approx([-1, 1, 1, 1])
    assert cosines(math.nan, 1) == pytest.approx([math.nan, math.nan, 1, 1], nan_ok=True)


@pytest.mark.parametrize("argv, words", [(["--sequences", "1"], "--sequences=1 must be at least 2"),
                                         (["--layer", "2"], "--layer=2 is outside layers 0..1"),
                                         (["--heads", "1", "2"], "--heads 1 2: the run has heads 0..1"),
                                         (["--steps", "12"], "need the rows of 32 steps, and 12 were recorded"),
                                         (["--steps", "5"], "no checkpoint of step 5"),
                                         (["--numerics", "sdpa"], "--numerics sdpa: the roundings of that are torch's"),
                                         (["--numerics", "flash_bf17"], "--numerics flash_bf17, in a layer of"),
                                         (["--numerics", "softcap=5"], "--numerics softcap=5 has softcap between"),
                                         (["--out", "curves.png"], "curves.png would be both"),
                                         (["--out", "."], ". cannot be written")])
def test_what_a_user_can_change(run, argv, words, capsys):  # noqa: F811
    assert delta_bias.main([str(run), "--device", "cpu", *argv]) == 2
    assert words in capsys.readouterr().err


def test_numerics_fit_what_the_layer_was_switched_to(run, monkeypatch, capsys):  # noqa: F811
    """Told before the checkpoints before the switch are measured."""
    config, plan = delta_bias.open_run(delta_bias.chosen(run, ":"))
    last = delta_bias.checkpoint.step_of(delta_bias.chosen(run, ":")[-1])
    plan.switches = [Switch(last, 1, AttentionSpec("standard").key)]
    monkeypatch.setattr(delta_bias, "open_run", lambda *_: (config, plan))
    monkeypatch.setattr(delta_bias, "models_of", lambda *_: pytest.fail("read a checkpoint"))
    assert delta_bias.main([str(run), "--device", "cpu", "--sequences", "2", "--numerics", "delta=do_o"]) == 2
    assert "--numerics delta=do_o, in a layer of standard: " in capsys.readouterr().err


def test_what_is_not_finite_is_nan_and_drawn_again(run, tmp_path):  # noqa: F811
    """A shift of 200 leaves a row no P: its O is 0 / 0."""
    out, wrong = tmp_path / "found.json", "stabilizer=fixed+fixed_shift=200"
    assert delta_bias.main([str(run), "--device", "cpu", "--sequences", "2", "--out", str(out), "--heads", "0",
                            "--numerics", "run", wrong]) == 0
    for line in json.loads(out.read_text())["rows"]:
        assert (line["error_share"] == line["error_rank_one"] == line["push"] == "NaN") == (line["numerics"] == wrong)
    first = (tmp_path / "found.png").read_bytes()
    assert delta_bias.main([str(out), "--draw"]) == 0 and (tmp_path / "found.png").read_bytes() == first
    numbers = out.rename(tmp_path / "numbers.png")
    assert delta_bias.main([str(numbers), "--draw"]) == 2 and json.loads(numbers.read_text())


@pytest.mark.parametrize("option", ["qk_norm", "softcap"])
def test_a_run_with_something_between_w_q_and_the_scores_is_refused(run, monkeypatch, capsys, option):  # noqa: F811
    config, plan = delta_bias.open_run(delta_bias.chosen(run, ":"))
    if option == "softcap":
        plan.specs[:] = [dataclasses.replace(spec, softcap=5.0) for spec in plan.specs]
    else:
        config = dataclasses.replace(config, qk_norm=True)
    monkeypatch.setattr(delta_bias, "open_run", lambda *_: (config, plan))
    assert delta_bias.main([str(run), "--device", "cpu"]) == 2
    assert f"the run has {option} between them" in capsys.readouterr().err


def test_smooth_k_goes_on_from_what_the_run_took_out(run, monkeypatch, capsys):  # noqa: F811
    """Keys as the run read them, less the further share, are keys less all of it; a mean that is gone stays gone."""
    k = torch.randn(2, 9, 4, dtype=torch.float64) + 3
    for had, wanted in ((0.0, 1.0), (-1.0, 0.5), (0.25, -3.0), (1.0, 1.0)):
        read, spec = (AttentionSpec(smooth_k=share) for share in (had, wanted))
        further = delta_bias._further(read, spec).smooth_k
        assert torch.allclose(smooth_keys(smooth_keys(k, had), further), smooth_keys(k, wanted))
    config, plan = delta_bias.open_run(delta_bias.chosen(run, ":"))
    plan.specs[:] = [dataclasses.replace(spec, smooth_k=1) for spec in plan.specs]
    monkeypatch.setattr(delta_bias, "open_run", lambda *_: (config, plan))
    assert delta_bias.main([str(run), "--device", "cpu", "--numerics", "run", "smooth_k=0"]) == 2
    assert "--numerics smooth_k=0: the run's keys have lost their mean" in capsys.readouterr().err
