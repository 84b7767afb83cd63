"""The determinism check on a CPU: runs that repeat, and what it says where something differs."""

import json
import shutil
import sys

import pytest
import torch
from tiny_runs import TINY, write_corpus

import checkpoint
import scripts.check_determinism as check
from config import ConfigError


def flags(tmp_path):
    own = ("max_iters", "eval_interval", "checkpoint_interval")
    chosen = {key: value for key, value in TINY.items() if key not in own}
    return [f"--{k}={v}" for k, v in (chosen | {"dataset": write_corpus(tmp_path / "data")}).items()]


def test_two_ranks_repeat_and_replay_on_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "runs" / "check"
    argv = ["configs/cpu_standard.toml", "--steps=4", "--ranks=2", "--replay_steps=3", f"--out={out}", *flags(tmp_path)]
    assert check.main(argv) == 0
    assert "4 steps twice on 2 rank(s): equal, bit for bit" in capsys.readouterr().out
    result = json.loads((out / "check.json").read_text())
    assert result["equal"] and result["replay_offsets_equal"] and 0 <= result["replay_largest_loss_difference"] < 1e-4
    assert check.main(argv) == 2 and "exists; choose another" in capsys.readouterr().err

    # One bit of one weight, and one digit of one loss.
    broken = shutil.copytree(out / "second", tmp_path / "broken")
    state = torch.load(broken / "ckpt_00000004.pt", weights_only=True)
    state["model"]["transformer.h.1.mlp.c_fc.weight"][3, 5] *= 1 + 2**-23
    torch.save(state, broken / "ckpt_00000004.pt")
    lines = (broken / "metrics.jsonl").read_text().splitlines()
    record = json.loads(lines[2])
    lines[2] = json.dumps(record | {"loss": record["loss"] + 0.25})
    (broken / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert check.differences(out / "first", out / "second") == []
    loss, weights = check.differences(out / "first", broken)
    assert loss == "loss first differs at step 2"
    assert weights.endswith("differ, first model.transformer.h.1.mlp.c_fc.weight") and weights.startswith("1 of ")
    assert check.compare_replay(out / "first", broken, 3)[1] == pytest.approx(0.25)


def test_what_is_wrong_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="cannot read the config file none"):
        check.main(["none.toml", f"--out={tmp_path / 'out'}"])
    with pytest.raises(ValueError, match="--tolerance=nan must be zero or more"):
        check.main(["configs/cpu_standard.toml", "--tolerance=nan", f"--out={tmp_path / 'out'}"])
    with pytest.raises(ConfigError, match="batch_size=0 must be positive"):
        check.main(["configs/cpu_standard.toml", "--batch_size=0", f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_fails_is_told_in_its_own_words(tmp_path, ranks):
    with pytest.raises(SystemExit, match=r"status 2; its last lines.*\ntrain.py: error: .*none does not exist.*$"):
        check.main(["configs/cpu_standard.toml", "--steps=1", f"--dataset={tmp_path / 'none'}", f"--ranks={ranks}",
                    "--gradient_accumulation_steps=2", f"--out={tmp_path / 'out'}"])


def test_numbers_that_cannot_be_and_flags_of_the_training(tmp_path):
    for flag in ("--steps=0", "--ranks=0", "--replay_steps=-1"):
        with pytest.raises(ValueError, match=f"{flag} must be at least 1"):
            check.main(["configs/cpu_standard.toml", flag, f"--out={tmp_path / 'out'}"])
    with pytest.raises(ConfigError, match="none"):  # train.py's, not short for --replay_steps
        check.main(["configs/none.toml", "--replay=order.bin", f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_a_corpus_is_named_with_a_space_too(tmp_path, monkeypatch):
    """And not replaced by random tokens."""
    started = []
    monkeypatch.setattr(check, "run", lambda out, ranks, argv: started.append(argv))
    monkeypatch.setattr(check, "differences", lambda first, second: sys.exit(0))
    with pytest.raises(SystemExit):
        check.main(["configs/cpu_standard.toml", f"--out={tmp_path / 'out'}", "--dataset", "mine"])
    assert len(started) == 2 and all(argv[1:3] == ["--dataset", "mine"] for argv in started)
    assert not any("corpus" in flag for argv in started for flag in argv)


def test_runs_of_other_lengths_differ_and_losses_that_are_no_numbers_do_not(tmp_path):
    state = {"model": {"w": torch.ones(2)}}
    runs = {"first": ["NaN", 2.0], "second": ["NaN", 2.0], "short": ["NaN"], "other": ["NaN", 3.0]}
    for name, losses in runs.items():
        checkpoint.save(tmp_path / name, 2, state, keep=1)
        (tmp_path / name / "metrics.jsonl").write_text("".join(
            json.dumps({"step": i, "loss": loss}) + "\n" for i, loss in enumerate(losses)))
    assert check.differences(tmp_path / "first", tmp_path / "second") == []
    assert check.differences(tmp_path / "first", tmp_path / "short") == ["one run logged 2 steps, the other 1"]
    assert check.differences(tmp_path / "first", tmp_path / "other") == ["loss first differs at step 1"]
