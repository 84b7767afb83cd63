"""The isolation experiments' script: what it proposes, what it counts, and a run of it."""

import dataclasses
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attention import specs_of
from attention.spec import NO_SWITCHES, SWITCHES
from config import load, override
from scripts import arms, cures, grid, isolate, reproduce_mini
from scripts.isolate import ARMS
from scripts.outcomes import Arm
from scripts.rates import parser


def test_flags_for_the_training_are_no_abbreviations_of_the_scripts_own():
    args, extra = parser("", "out", ARMS).parse_known_args(["--seed=7", "--step=3", "--minutes", "2"])
    assert (args.seeds, args.steps, args.minutes, extra) == ([1, 2, 3, 4, 5], 10000, 2.0, ["--seed=7", "--step=3"])


@pytest.mark.parametrize("flags", [*(a.flags for a in cures.ARMS.values()), *grid.ROUNDED.values(),
                                   *(a.flags for a in ARMS.values())], ids=str)
def test_every_arm_is_a_config_that_can_run(flags):
    """The names of its flags, their values, and the specs that they make."""
    words = {"layer": 1, "head": 2, "heads": "2,3"}
    config = load(["configs/mini_flash_bf16.toml", *(flag.format(**words) for flag in flags)])
    specs = specs_of(config)
    assert len(specs) == config.n_layer


@pytest.mark.parametrize("table", [{n: a.flags for n, a in cures.ARMS.items()}, grid.ROUNDED,
                                   {n: a.flags for n, a in ARMS.items()}], ids=["cures", "grid", "isolate"])
def test_no_two_arms_of_a_table_are_one_run(table):
    """An arm that says a default again costs a run a seed and shows nothing."""
    words, runs = {"layer": 1, "head": 2, "heads": "2,3"}, {}
    for name, flags in table.items():
        config = load(["configs/mini_flash_bf16.toml", *(flag.format(**words) for flag in flags)])
        specs = specs_of(config)
        left = {k: v for k, v in dataclasses.asdict(config).items() if k not in
                {"attention", "attention_override", "output_heads", *SWITCHES}}
        keys = [dataclasses.asdict(spec) | {"backend": spec.backend in NO_SWITCHES and spec.backend} for spec in specs]
        key = json.dumps([left, keys], default=str)
        assert key not in runs, f"{name} is {runs[key]}"
        runs[key] = name


@pytest.mark.parametrize("flags, words", [
    (["--max_iters=2"], "--max_iters=2 cannot be passed on to train.py, as max_iters is set for every arm; give"),
    (["--max-iters", "2"], "give --steps"), (["--seed=5"], "give --seeds"), (["--out_dir=a"], "give --out"),
    (["--delta=do_o"], "--delta=do_o cannot be passed on to train.py, as arm delta_dp_p has --delta=dp_p; leave one"),
    (["pv_fp32", "--delta", "do_o"], "--delta cannot be passed on to train.py, as arm delta_dp_p has --delta=dp_p"),
    (["--attention=flash_fa2"], "as attention is set for every arm; give a --config with it"),
    (["--monitor=switch"], "arm delta_dp_p: monitor_remedy='delta=dp_p' changes nothing"),
    (["--init_from=resume"], "init_from=resume: an arm that has begun is resumed anyway"),
    (["--steps=0", "--collect"], "--steps=0 must be positive"),
    (["--kept", "kept", "--collect"], "--collect runs nothing, so --kept kept would be left out")])
def test_flags_that_would_be_lost_or_make_no_run(tmp_path, capsys, flags, words):
    argv = ["--config=configs/cpu_flash_bf16.toml", f"--out={tmp_path / 'out'}", "--arms", "delta_dp_p", *flags]
    assert isolate.main(isolate.__doc__, ARMS, "", "isolation.json", argv) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags, words", [
    (["--max_iters=2"], "give --steps"), (["--out_dir=a"], "give --out"), (["--replay=a"], "draws the order"),
    (["--smooth_k=1"], "as arm flash_fa2:smooth_k=-7:delta=dp_p has --smooth_k=-7; leave one of them out"),
    (["--record=False"], "draws the order"), (["--probe_interval=0"], "probe_interval=0; add --probe_interval=100"),
    (["--attention=sdpa"], "attention is set for every arm; name it in --arms"),
    (["--arms", "sdpa:max_iters=5"], "give --steps"), (["--arms", "sdpa:dataset=/x"], "give --dataset"),
    (["--monitor=switch"], "arm flash_bf16_delta_dp_p: monitor_remedy='delta=dp_p' changes nothing")])
def test_what_the_small_run_cannot_have(tmp_path, corpus, capsys, flags, words):
    """Each was found only when its runs had ended."""
    argv = [f"--dataset={corpus}", f"--out={tmp_path / 'out'}", "--device=cpu", *flags]
    assert reproduce_mini.main(argv) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag, arm", [("--smooth-k=1", "smooth_k has --smooth_k=1"), ("--eps=1", "adamw_eps_1e-5 has"),
                                       ("--learning_rate=1", "pv_delta_mini_0.003_32 has --learning_rate=0.003")])
def test_a_flag_that_an_arm_sets_is_not_passed_on_to_the_others(tmp_path, capsys, flag, arm):
    """In that arm it would be lost, and beside it the others would be of another experiment."""
    out = f"--out={tmp_path / 'out'}"
    if "learning_rate" in flag:
        assert grid.main([out, "--arms", "pv_delta", "--learning_rates=3e-3", "--batch_sizes=32", flag]) == 2
    else:
        argv = [out, "--arms", "weight_decay_0.1", "smooth_k", "adamw_eps_1e-5", flag]
        assert cures.main(cures.__doc__, cures.ARMS, "", "cures.json", argv) == 2
    assert f"{flag} cannot be passed on to train.py, as arm {arm}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_arm_of_the_small_run_is_what_it_is_called():
    name, flags = reproduce_mini.argv_of("flash_bf16:delta=dp_p", ["--delta=do_o_exact", "--dropout=0.1"])
    config = load(flags)
    assert (name, config.delta, config.dropout) == ("flash_bf16_delta_dp_p", "dp_p", 0.1)


def as_killed(run: Path) -> None:
    """Leaves a run's header as a kill does."""
    header = json.loads((run / "run.json").read_text())
    del header["sessions"][-1]["exit_code"]
    (run / "run.json").write_text(json.dumps(header))


def test_it_runs_and_goes_on_where_it_was(runner, corpus):
    """Two arms after the first one; a second call runs nothing again, a lost outcome is made up for by resuming."""
    flags = [a for a in runner.argv("unused") if not a.startswith(("--out_dir", "--dataset", "--max_iters"))]
    command = [sys.executable, "scripts/isolate.py", "--config", "configs/cpu_flash_bf16.toml", "--dataset",
               str(corpus), "--out", str(runner.root / "isolation"), "--seeds", "1", "--steps", "4", "--arms",
               "delta_dp_p", "o_fp32_outlier_heads", *flags, "--probe_interval=2", "--parallel=2"]
    out, err = runner.start(command).communicate(timeout=120)
    folder = runner.root / "isolation"
    found = json.loads((folder / "isolation.json").read_text())
    assert [r["arm"] for r in found["rows"]] == ["flash_bf16", "delta_dp_p", "o_fp32_outlier_heads"], (out, err)
    assert all(r["failed"] is False and r["last_step"] == 3 and r["wq_norm"] > 0 for r in found["rows"])
    specs = json.loads((folder / "seed1/o_fp32_outlier_heads/run.json").read_text())["attention"]
    assert "fp32_heads=" in specs[found["rows"][0]["layer"]]
    assert "flash_bf16            fails     0 of 1  0.00 to 0.79  undecided" in out

    as_killed(folder / "seed1/delta_dp_p")
    out, err = runner.start(command).communicate(timeout=120)
    assert out.count("started") == 1 and "delta_dp_p: started" in out, (out, err)
    assert json.loads((folder / "isolation.json").read_text()) == found
    assert (folder / "isolation.png").stat().st_size > 5000

    # What is kept of it elsewhere, as another machine's call, makes the same table, and so do the kept logs alone.
    for number, source in enumerate((folder, runner.root / "kept0")):
        kept = runner.root / f"kept{number}"
        argv = ["--collect", str(source), "--out", str(kept), "--seeds", "1", "--steps", "4", "--arms", "delta_dp_p",
                "o_fp32_outlier_heads"]
        assert isolate.main(isolate.__doc__, ARMS, "", "isolation.json", argv) == 0
        assert json.loads((kept / "isolation.json").read_text()) == found
    assert not list(runner.root.glob("kept*/**/*.pt")) and (kept / "seed1/flash_bf16.run.json").exists()

    # Another machine goes on from the kept logs, but not with other flags.
    command[command.index(str(folder))] = str(runner.root / "elsewhere")
    command[command.index("--arms") + 1:command.index("--arms") + 1] = ["pv_fp32", "o_fp32_worst_head"]
    command += ["--kept", str(kept)]
    out, err = runner.start(override(command, "--weight_decay=0.3")).communicate(timeout=120)
    assert f"in {runner.root / 'elsewhere'}, has weight_decay=0.3, and " in err and "started" not in out, err
    assert f", in {kept / 'seed1'}, weight_decay=" in err, err
    out, err = runner.start(command).communicate(timeout=120)
    assert out.count("started") == 2 and "pv_fp32: started" in out and "o_fp32_worst_head: started" in out, (out, err)
    more = json.loads((runner.root / "elsewhere/isolation.json").read_text())
    assert all(row in more["rows"] for row in found["rows"]) and len(more["rows"]) == 5


def test_grid_runs_each_arm_at_each_point_and_draws_it(runner, corpus):
    own = ("--out_dir", "--dataset", "--max_iters", "--batch_size", "--learning_rate")
    flags = [a for a in runner.argv("unused") if not a.startswith(own)]
    out = runner.root / "grid"
    command = [sys.executable, "scripts/grid.py", "--config", "configs/cpu_flash_bf16.toml", "--dataset", str(corpus),
               "--out", str(out), "--steps", "2", "--arms", "scores_pv", "--learning_rates", "1e-3", "2e-3",
               "--batch_sizes", "2", "--parallel", "2", *flags]
    said = runner.start(command).communicate(timeout=120)
    found = json.loads((out / "grid.json").read_text())
    assert [r["arm"] for r in found["rows"]] == ["scores_pv_tiny_0.001_2", "scores_pv_tiny_0.002_2"], said
    assert all(r["failed"] is False for r in found["rows"]) and (out / "grid.png").stat().st_size > 5000
    config = json.loads((out / "seed1/scores_pv_tiny_0.002_2/run.json").read_text())["config"]
    assert (config["learning_rate"], config["batch_size"], config["delta"]) == (2e-3, 2, "dp_p")


def test_the_small_run_and_its_replays_end_in_a_comparison(runner, corpus, capsys):
    """scripts/reproduce_mini.py on the CPU: one record, two replays of it, figures and numbers. Called again it goes on
    with what was killed, and with more steps, to the same numbers; other flags are refused."""
    own = ("--out_dir", "--dataset", "--max_iters", "--seed")
    flags = [a for a in runner.argv("unused") if not a.startswith(own)]
    out = runner.root / "mini"
    command = [sys.executable, "scripts/reproduce_mini.py", "--dataset", str(corpus), "--out", str(out), "--steps", "4",
               "--arms", "standard", "flash_bf16:delta=dp_p", "--parallel", "2", *flags,
               "--probe_interval=2", "--log_interval=1"]
    said = runner.start(command).communicate(timeout=120)
    rows = json.loads((out / "comparison.json").read_text())["runs"]
    assert [r["name"] for r in rows] == ["flash_bf16", "standard", "flash_bf16_delta_dp_p"], said
    assert all(r["common_steps"] == 4 for r in rows)
    assert all((out / name).stat().st_size > 20_000 for name in ("figure.png", "layers.png"))
    assert said[0].splitlines()[-1] == ("W_Q ran away under none; not under flash_bf16 (4 steps), standard (4 "
                                        "steps), flash_bf16_delta_dp_p (4 steps).")
    for arm in ("flash_bf16", "standard"):
        as_killed(out / arm)
    said = runner.start(command).communicate(timeout=120)
    assert [line.split()[3] for line in said[0].splitlines() if "started" in line] == ["flash_bf16:", "standard:"], said
    assert json.loads((out / "comparison.json").read_text())["runs"] == rows
    said = runner.start(override(command, "--steps=6")).communicate(timeout=120)
    more = json.loads((out / "comparison.json").read_text())["runs"]
    assert [r["common_steps"] for r in more] == [6, 6, 6] and said[0].count("started") == 3, said
    assert more[1]["difference"]["signed"][:4] == rows[1]["difference"]["signed"]
    for flags, message in ((["--steps=6", "--seed=2"], "flash_bf16 was begun with seed=1, and this command says 2;"),
                           (["--steps=5"], "flash_bf16 is at step 6, past --steps=5; give at least that, or")):
        assert reproduce_mini.main(override(command[2:], *flags)) == 2 and message in capsys.readouterr().err


def test_the_small_run_says_what_ran_away():
    rows = [{"name": name, "steps": 5000, "ran_away": away, "step_of_runaway": step, "layer_of_runaway": layer,
             "scores_ran_away": away and name != "sdpa", "step_of_scores": step and step - 900,
             "layer_of_scores": layer}
            for name, away, step, layer in (("flash_bf16", True, 4000, 1), ("standard", False, None, None),
                                            ("sdpa", True, 3500, 1), ("bare", None, None, None))]
    assert reproduce_mini.what_ran_away(rows) == (
        "Scores (above 1000) ran away under flash_bf16 (layer 1, step 3100); not under standard (5000 steps), sdpa "
        "(5000 steps); not probed under bare.\n"
        "W_Q ran away under flash_bf16 (layer 1, step 4000), sdpa (layer 1, step 3500); not under standard (5000 "
        "steps); not probed under bare.")
    assert reproduce_mini.what_ran_away(rows[:1]).endswith("\nW_Q ran away under flash_bf16 (layer 1, step 4000).")


def test_the_small_runs_own_arms_can_run_and_stop_where_w_q_shows(tmp_path, corpus, monkeypatch):
    """Every arm by default passes the check before the first one starts, for 5,000 steps."""
    started = []

    def run_arms(queue, *_, steps):
        started.extend([*queue, steps])
        raise KeyboardInterrupt

    monkeypatch.setattr(reproduce_mini, "run_arms", run_arms)
    assert reproduce_mini.main(["--dataset", str(corpus), "--out", str(tmp_path / "mini"), "--device=cpu"]) == 130
    assert started == ["flash_bf16", 5000]


def test_the_small_run_interrupted_goes_on(runner, corpus):
    """SIGTERM while it records: the run saves and ends, and the same command ends with the comparison."""
    own = ("--out_dir", "--dataset", "--max_iters", "--seed")
    flags = [a for a in runner.argv("unused") if not a.startswith(own)]
    out = runner.root / "mini"
    command = [sys.executable, "scripts/reproduce_mini.py", "--dataset", str(corpus), "--out", str(out), "--steps",
               "200", "--arms", "standard", *flags, "--probe_interval=50", "--log_interval=1"]
    script = runner.start(command)
    runner.wait_for_step(script, "mini/flash_bf16", 5)
    script.send_signal(signal.SIGTERM)
    said = script.communicate(timeout=60)
    assert script.returncode == 130 and "interrupted; the same command goes on" in said[1], said
    assert arms.outcome(out / "flash_bf16") == 143 and not (out / "standard").exists()
    again = runner.start(command)
    said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    assert [r["common_steps"] for r in json.loads((out / "comparison.json").read_text())["runs"]] == [200, 200]


@pytest.fixture
def one_arm(runner, corpus):
    """scripts/isolate.py with one arm of one seed on the tiny run: (folder, function of steps -> its command)."""
    flags = [a for a in runner.argv("unused") if not a.startswith(("--out_dir", "--dataset", "--max_iters"))]
    return runner.root / "arms", lambda steps: [
        "--config", "configs/cpu_flash_bf16.toml", "--dataset", str(corpus), "--out", str(runner.root / "arms"),
        "--seeds", "1", "--steps", str(steps), "--arms", "pv_fp32", *flags]


def table(folder) -> dict:
    (found,) = json.loads((folder / "isolation.json").read_text())["rows"]
    return found


def test_more_steps_go_on_and_fewer_are_refused(one_arm, capsys):
    """An arm that was stable for 3 steps is not one that was stable for 5."""
    folder, argv = one_arm
    for steps in (3, 5):
        assert isolate.main(isolate.__doc__, ARMS, "", "isolation.json", argv(steps)) == 0
        assert (table(folder)["failed"], table(folder)["last_step"]) == (False, steps - 1)
    assert isolate.main(isolate.__doc__, ARMS, "", "isolation.json", argv(4)) == 2
    assert "seed1/pv_fp32 is at step 5, past --steps=4; give at least that, or" in capsys.readouterr().err


@pytest.mark.parametrize("killed", [False, True])
def test_an_arm_without_its_checkpoints_is_kept_and_cannot_go_on(one_arm, capsys, killed):
    """Its log is its outcome, for as many steps as it has; more, or what was not finished, is told, not left undone."""
    folder, argv = one_arm
    assert isolate.main(isolate.__doc__, ARMS, "", "isolation.json", argv(3)) == 0
    found, run = table(folder), folder / "seed1/pv_fp32"
    for path in run.glob("*.pt"):
        path.unlink()
    assert isolate.main(isolate.__doc__, ARMS, "", "isolation.json", argv(3)) == 0 and table(folder) == found
    if killed:
        as_killed(run)
    capsys.readouterr()
    log = (folder / "seed1/pv_fp32.log").read_text()
    assert isolate.main(isolate.__doc__, ARMS, "", "isolation.json", argv(5)) == 2
    said = capsys.readouterr().err
    assert f"{run} is at step 3 and cannot go on, as its checkpoints are gone; put its ckpt_*.pt back, or move" in said
    assert len(said.splitlines()) == 1 and ("or give --steps=3" in said) != killed
    assert (folder / "seed1/pv_fp32.log").read_text() == log and table(folder) == found
    run.rename(folder / "away")
    assert isolate.main(isolate.__doc__, ARMS, "", "isolation.json", argv(5)) == 0 and table(folder)["last_step"] == 4


def test_an_interrupted_experiment_leaves_no_arm_running_and_a_table(runner, one_arm):
    """SIGTERM to the script: its arm saves and ends, and an arm that has logged no loss yet is an unfinished one."""
    folder, argv = one_arm
    script = runner.start([sys.executable, "scripts/isolate.py", *argv(100_000)])
    deadline = time.monotonic() + 60
    while not (folder / "seed1/pv_fp32/run.json").exists():
        assert script.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    script.send_signal(signal.SIGTERM)
    said = script.communicate(timeout=60)
    assert arms.outcome(folder / "seed1/pv_fp32") == 143 and "interrupted; the same command goes on" in said[1], said
    assert script.returncode == 130
    assert table(folder)["failed"] is None


@pytest.mark.parametrize("kill", [True, False])
def test_an_arm_that_runs_already_is_waited_for(runner, one_arm, kill):
    """The same command again, at once: after a kill -9, whose arm goes on by itself, and beside a call that goes on."""
    folder, argv = one_arm
    command = [sys.executable, "scripts/isolate.py", *argv(200)]
    log, deadline = folder / "seed1/pv_fp32.log", time.monotonic() + 60
    first = runner.start(command)
    while not (log.exists() and log.read_text()):  # its train.py has no folder yet
        assert first.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    if kill:
        first.kill()
    second = runner.start(command)
    said = second.communicate(timeout=120)
    assert second.returncode == 0 and "seed1/pv_fp32: runs already, by another call; waiting for it" in said[0], said
    assert first.wait(timeout=60) == (-signal.SIGKILL if kill else 0)
    assert log.read_text().count("train.py") == 1 and table(folder)["last_step"] == 199


def test_an_arm_that_has_begun_with_other_flags_is_refused(one_arm, capsys):
    folder, argv = one_arm
    assert isolate.main(isolate.__doc__, ARMS, "", "isolation.json", argv(2)) == 0
    before = (folder / "isolation.json").read_text()
    assert isolate.main(isolate.__doc__, ARMS, "", "isolation.json",
                        override(argv(3), "--learning_rate=2e-3")) == 2
    assert "pv_fp32 was begun with learning_rate=0.01, and this command says 0.002; give" in capsys.readouterr().err
    assert (folder / "isolation.json").read_text() == before and arms.last_step(folder / "seed1/pv_fp32") == 2


def test_an_experiment_run_from_another_folder_reads_what_it_wrote(one_arm):
    folder, argv = one_arm
    command = [a if a != str(folder) else folder.name for a in argv(2)]
    subprocess.run([sys.executable, arms.ROOT / "scripts/isolate.py", *command], cwd=folder.parent, check=True,
                   capture_output=True, timeout=60)
    assert table(folder)["last_step"] == 1


@pytest.mark.parametrize("flags, message", [
    (["--dataset", "/nowhere"], "arm pv_fp32: the data folder /nowhere does not exist"),
    (["--replay=/nowhere/order.bin"], "arm pv_fp32: the order file /nowhere/order.bin cannot be read: No such file"),
    (["--parallel", "0"], "--parallel=0 must be positive"),
    (["--minutes", "nan"], "--minutes=nan must be positive"),
    (["--seeds", "1", "-1"], "seed=-1 must be zero or more"),
    (["--device=cuda:99"], "arm pv_fp32: device=cuda:99 (needs a CUDA GPU|does not exist)"),
    (["--monitor=stop"], "arm pv_fp32: monitor=stop ends a run before it is known .* use --monitor=warn"),
    (["--pv=fp16"], "pv_fp32: pv='fp16'|pv='fp16' is not one of"),
    (["--learnin_rate=1"], "learnin"),
    (["--arms"], "--arms: expected at least one argument"),
    (["--collect", "/nowhere"], "--collect runs nothing, so .* cannot be passed on to train.py; leave it out"),
    (["--arms", "standard_in_that_layer", "--probe_interval=0"], "probe_interval=0; add --probe_interval=100")])
def test_what_cannot_run_is_told_before_anything_is_started(one_arm, capsys, flags, message):
    folder, argv = one_arm
    try:
        code = isolate.main(isolate.__doc__, {**ARMS, "pv_fp32": Arm()}, "", "isolation.json",
                            override(argv(2), *flags))
    except SystemExit as stop:  # argparse's
        code = stop.code
    said = capsys.readouterr()
    assert code == 2 and re.search(message, " ".join((said.out + said.err).split())) and not folder.exists()


def test_an_arm_that_ends_with_an_error_is_told(one_arm, monkeypatch, capsys):
    folder, argv = one_arm
    (folder / "seed1").mkdir(parents=True)
    (folder / "seed1/pv_fp32").write_text("no folder")
    assert isolate.main(isolate.__doc__, ARMS, "", "isolation.json", argv(2)) == 1
    assert "1 arm(s) ended with an error, see" in capsys.readouterr().err


@pytest.mark.parametrize("arm, message", [("flash_bf16:delt=dp_p", "delt"), ("flash_bf16", "an arm is named twice, or"),
                                          ("flash", "flash"), ("standard:pv=fp32", "arm standard_pv_fp32: ")])
def test_the_small_run_checks_its_arms_before_it_records(tmp_path, corpus, capsys, arm, message):
    argv = ["--dataset", str(corpus), "--out", str(tmp_path / "mini"), "--device=cpu", "--arms", arm]
    try:
        code = reproduce_mini.main(argv)
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    assert code == 2 and message in said.out + said.err and not (tmp_path / "mini").exists()


def test_an_experiment_of_losses_that_are_not_numbers_is_json(tmp_path, monkeypatch):
    found = {"rows": [{"arm": "a", "last_step": None, "final_loss": math.nan}],
             "summary": [{"arm": "a", "begun": 0}], "errors": []}
    monkeypatch.setattr("scripts.rates.collect_experiment", lambda *_: found)
    argv = ["--collect", "--out", str(tmp_path)]
    assert isolate.main(isolate.__doc__, ARMS, "", "isolation.json", argv) == 0
    assert json.loads((tmp_path / "isolation.json").read_text(), parse_constant=pytest.fail)
