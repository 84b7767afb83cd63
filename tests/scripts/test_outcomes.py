"""Rates, their tables and figures, from logs alone; and the tables in results/ from the logs that are kept there."""

import contextlib
import dataclasses
import json
import math
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from config import Config, ConfigError, as_dict, load
from scripts import arms, cures, grid, isolate, outcomes, rates
from scripts.collect import collect, thin
from scripts.isolate import ARMS
from scripts.monitor import by_run
from scripts.outcomes import Arm, failed_by, fewer, interval, propose, row, summary, verdict
from scripts.runs import Run, load_run

ROOT = Path(__file__).parents[2]


def recorded(norms_by_layer) -> Run:
    record = {"step": 100, "loss": 3.0} | {f"probe/wq_norm_head/layer{i}": n for i, n in enumerate(norms_by_layer)}
    early = {"step": 0, "loss": 9.0, "probe/wq_norm_head/layer0": [99.0] * 12}
    return Run(Path("."), True, {}, [early, record], "run")


def test_the_papers_own_norms_give_its_layer_and_its_outlier_heads():
    """Figure 3's norms; section 3.2 calls heads 1, 7, 8, 9, 11 and 12, from 1, outliers, and head 8 the worst."""
    figure3 = [4.34, 2.68, 1.90, 2.67, 2.04, 2.66, 4.12, 6.27, 5.32, 1.74, 4.64, 5.39]
    found = propose(recorded([[3.0] * 12, figure3, [2.0] * 12]))
    assert (found["layer"], found["head"], found["heads"]) == (1, 7, [0, 6, 7, 8, 10, 11])


def test_the_failing_runs_own_log_gives_the_head_that_its_failure_began_in():
    """results/mini tells of head 2; at the last probe, when the run has exploded, heads 1, 4 and 5 lead instead."""
    found = propose(load_run(ROOT / "results/mini/seed1_b64_flash_bf16.jsonl.xz"))
    assert (found["layer"], found["head"], found["heads"]) == (1, 2, [0, 2])


def test_where_no_head_is_above_the_mean_the_worst_one_is_proposed():
    """An arm that names no head could not run."""
    assert propose(recorded([[1.0], [2.0]]))["heads"] == propose(recorded([[2.0, 2.0]]))["heads"] == [0]


def test_a_run_without_probes_is_refused():
    with pytest.raises(ValueError, match="no probe/wq_norm_head values"):
        propose(Run(Path("."), True, {}, [{"step": 0, "loss": 1.0}], "bare"))


@pytest.mark.parametrize("failed, runs", [(0, 5), (3, 10), (10, 10), (1, 1)])
def test_interval_solves_wilsons_equation(failed, runs):
    """Its ends are the rates p at which the observed rate is 1.96 standard deviations of p away."""
    for end, sign in zip(interval(failed, runs), (-1, 1), strict=True):
        if 0 < end < 1:
            assert (failed / runs - end) * -sign == pytest.approx(1.96 * math.sqrt(end * (1 - end) / runs))
    assert interval(0, 5)[0] == 0 and interval(10, 10)[1] == 1 and interval(0, 0) == (0, 1)


def test_unfinished_runs_are_counted_as_such():
    rows = [{"arm": "pv_fp32", "seed": s, "failed": f} for s, f in enumerate((True, False, None))]
    line = next(s for s in summary(rows, ARMS) if s["arm"] == "pv_fp32")
    assert (line["failed"], line["finished"], line["unfinished"], line["paper"]) == (1, 2, 1, "stable")
    assert len(summary(rows, ARMS)) == len(ARMS) and line["median_final_loss"] is None


def test_a_runaway_is_known_before_the_run_has_ended():
    """Seed 1's layer 1 passes 3 times the median at step 40 and is cut off; seed 2 is cut off before it might."""
    def run(steps, grows_at):
        records = [{"step": step, "loss": 3.0} | {f"probe/wq_norm_head/layer{i}": [1.0, 1.0 + 9 * (i == 1 and step >=
                    grows_at)] for i in range(3)} for step in range(0, steps, 20)]
        return Run(Path("."), True, {}, records, "run")

    found = [row("a", seed, run(steps, 40), None, 100) for seed, steps in ((1, 60), (2, 40), (3, 120))]
    assert [(r["ran_away"], r["step_of_runaway"], r["failed"]) for r in found] == [
        (True, 40, None), (None, None, None), (True, 40, False)]
    (line,) = summary(found, {"a": Arm()})
    assert (line["ran_away"], line["ran_away_or_finished"], line["median_step_of_runaway"]) == (2, 2, 40)
    assert (line["runaway_low"], line["runaway_high"]) == (interval(2, 3)[0], 1)
    assert row("a", 1, run(101, 200), None, 100)["ran_away"] is False


def test_medians_are_over_finished_runs():
    rows = [{"arm": "a", "seed": 1, "failed": f, "step_of_failure": s, "final_loss": loss} for f, s, loss in
            ((True, 100, 5.0), (True, 300, 6.0), (False, None, 3.0), (None, None, 99.0))]
    (line,) = summary(rows, {"a": Arm()})
    assert (line["median_step_of_failure"], line["median_final_loss"], line["median_ties"]) == (200, 5.0, None)


@pytest.mark.parametrize("first, arm, p", [
    ("FFFFF", "sssss", 1 / 32), ("FFFF", "ssss", 1 / 16), ("FFs", "FFs", 1), ("FFFs", "sssF", 5 / 16),
    ("sss", "FFF", 1), ("", "", None)])
def test_p_is_the_binomial_tail_of_the_seeds_on_which_two_arms_differ(first, arm, p):
    """By hand: 3 of 4 split seeds are the first run's, so p = (4 + 1) / 16."""
    assert fewer(*({seed: letter == "F" for seed, letter in enumerate(word)} for word in (first, arm))) == p


def test_p_is_of_the_seeds_that_both_finished():
    assert fewer({1: True, 2: True, 3: True}, {2: False, 4: True}) == 1 / 2


@pytest.mark.parametrize("paper, first, arm, said", [
    ("stable", 5, 0, "agrees"), ("stable", 4, 0, "undecided"), ("stable", 5, 5, "disagrees"),
    ("stable", 0, 0, "undecided"), ("fails", 5, 5, "agrees"), ("fails", 5, 0, "disagrees"),
    ("fails", 5, 3, "undecided"), ("not tried", 5, 0, "-")])
def test_verdict_of_five_seeds(paper, first, arm, said):
    """Too few failures of the first run leave a cure undecided, however stable it was."""
    rows = [{"arm": name, "seed": seed, "failed": seed < failed} for name, failed in (("flash_bf16", first), ("a", arm))
            for seed in range(5)]
    line = summary(rows, {"flash_bf16": Arm(), "a": Arm((), paper)})[1]
    assert line["verdict"] == said


def test_a_run_that_was_cut_off_may_still_fail():
    """3 of 3 finished ones failed, of 10 begun: that is no rate of 1. One that was not begun says nothing."""
    rows = [{"arm": "flash_bf16", "seed": s, "failed": True if s < 3 else None, "last_step": 9 if s < 10 else None}
            for s in range(11)]
    (line,) = summary(rows, {"flash_bf16": Arm((), "fails")})
    assert (line["failed"], line["finished"], line["unfinished"], line["verdict"]) == (3, 3, 8, "undecided")
    assert (line["rate_low"], line["rate_high"]) == (interval(3, 10)[0], 1)


def test_without_a_first_run_nothing_is_decided():
    (line,) = summary([{"arm": "a", "seed": s, "failed": False} for s in range(20)], {"a": Arm((), "stable")})
    assert (line["p_fewer"], line["verdict"]) == (None, "undecided") and verdict("fails", 0.9, 1.0, None) == "agrees"


def line_of(failure, last, runaway=None):
    return {"step_of_failure": failure, "last_step": last, "step_of_runaway": runaway}


def test_share_failed_by_a_step_leaves_out_runs_that_ended_before():
    """By hand: 1 of 4 at risk fails at 10; one run is cut off at 20; 1 of the 2 left fails at 30: 1 - 3/4 * 1/2."""
    rows = [line_of(10, 10), line_of(None, 20), line_of(30, 30), line_of(None, 99)]
    assert failed_by(rows) == ([0, 10, 30], [0.0, 0.25, 0.625])
    assert failed_by([line_of(None, 5)]) == ([0], [0.0])
    assert failed_by([line_of(50, 50, 20), line_of(None, 99)], "step_of_runaway") == ([0, 20], [0.0, 0.5])


def write_run(folder, seed, steps, fails_at=None, probe=True, session=0, every=1, **config) -> Path:
    """The log and header of a run of 3 layers and 2 heads, logged every so often; layer 1 is the one that grows."""
    draw, folder = random.Random(f"{folder.name} {seed}"), Path(folder)
    folder.mkdir(parents=True)
    header = {"config": {"seed": seed, "batch_size": 64, "out_dir": str(folder), "max_iters": steps} | config,
              "attention": [f"flash_bf16 delta={config.get('delta') or 'do_o'}"], "data": {"sha256": "d1"},
              "git_commit": "c1", "device_name": "GPU", "sessions": [{"exit_code": session}]}
    (folder / "run.json").write_text(json.dumps(header))
    with (folder / "metrics.jsonl").open("w") as log:
        for step in range(0, fails_at + 1 if fails_at else steps, every):
            record = {"step": step, "loss": math.inf if step == fails_at else 3 + draw.random() / 100,
                      "time": 1.7e9 + draw.random()}
            if step % 20 == 0 and probe:
                record |= {f"probe/wq_norm_head/layer{i}": [draw.random() + (i == 1), draw.random()] for i in range(3)}
                record |= {f"probe/ties_head/layer{i}": [draw.random(), draw.random()] for i in range(3)}
                record |= {f"probe/norm_W_Q/layer{i}": draw.random() for i in range(3)}
            log.write(json.dumps(record).replace("Infinity", '"Infinity"') + "\n")
    return folder


def table_of(out, *flags, steps=100, seeds=(1, 2), arms=("flash_bf16", "delta_dp_p"), module=isolate, name="isolation"):
    argv = ["--out", str(out), "--steps", str(steps), "--seeds", *map(str, seeds), "--arms", *arms, *flags]
    code = rates.main("", module.ARMS, "", f"{name}.json", argv)
    return json.loads((out / f"{name}.json").read_text()) if code == 0 else code


def test_calls_on_several_machines_make_one_table(tmp_path):
    """What one call left unfinished another finished; the table of the merged logs is that of the logs it keeps."""
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "kept"
    write_run(a / "seed1/flash_bf16", 1, 100, fails_at=70)
    write_run(a / "seed1/delta_dp_p", 1, 40, delta="dp_p", session=143)
    write_run(b / "seed1/delta_dp_p", 1, 100, delta="dp_p")
    write_run(b / "seed2/flash_bf16", 2, 60, session=143)
    found = table_of(out, "--collect", str(a), str(b))
    assert [(r["arm"], r["seed"], r["failed"], r["step_of_failure"], r["last_step"]) for r in found["rows"]] == [
        ("flash_bf16", 1, True, 70, 70), ("flash_bf16", 2, None, None, 59),
        ("delta_dp_p", 1, False, None, 99), ("delta_dp_p", 2, None, None, None)]
    assert found["proposals"]["1"]["layer"] == 1 and "2" not in found["proposals"]
    assert all(1 < r["wq_norm"] < 2 for r in found["rows"] if r["seed"] == 1)
    assert found["made_with"] == {"git_commit": ["c1"], "device_name": ["GPU"], "data": ["d1"]}
    assert table_of(out, "--collect") == found and (out / "isolation.png").stat().st_size > 5000
    assert {p.name for p in out.glob("seed*/*")} == {f"{arm}.{end}" for arm in ("flash_bf16", "delta_dp_p")
                                                     for end in ("jsonl.xz", "run.json")}


def test_each_run_is_held_against_its_arm_once(tmp_path, monkeypatch):
    write_run(tmp_path / "seed1/flash_bf16", 1, 100)
    write_run(tmp_path / "seed2/flash_bf16", 2, 100)
    compared, says = [], outcomes._says
    monkeypatch.setattr(outcomes, "_says", lambda text, value: compared.append(value) or says(text, value))
    assert table_of(tmp_path, "--collect", arms=("flash_bf16",))["rows"] and compared == [1, 2]


def test_a_table_of_fewer_steps_forgets_what_came_after(tmp_path):
    write_run(tmp_path / "seed1/flash_bf16", 1, 100, fails_at=70)
    (line, _) = table_of(tmp_path, "--collect", steps=50, seeds=(1,))["rows"]
    assert (line["failed"], line["step_of_failure"], line["last_step"]) == (False, None, 49)


def test_a_run_that_went_on_past_the_last_step_is_finished_whatever_it_logged(tmp_path):
    write_run(tmp_path / "seed1/flash_bf16", 1, 101, every=10)
    for steps, failed in ((85, False), (100, False), (150, None)):
        (line,) = table_of(tmp_path, "--collect", steps=steps, seeds=(1,), arms=("flash_bf16",))["rows"]
        assert line["failed"] is failed, steps


@pytest.mark.parametrize("seed, change, message", [
    (2, {"batch_size": 32}, "delta_dp_p of seed 2, in {b}, has batch_size=32, and delta_dp_p of seed 1, in {a}, "
                            "batch_size=64: they are not of one experiment; leave one out"),
    (1, {"batch_size": 32}, "delta_dp_p of seed 1, in {b}, has batch_size=32, and delta_dp_p of seed 1, in {a}, "),
    (2, {"smooth_k": True}, "has smooth_k=1.0, and delta_dp_p of seed 1, in {a}, smooth_k=0.0"),  # as of its commit
    (1, {"fails_at": 60}, "finished runs of one arm and seed differ: {a} is stable, {b} failed at step 60; leave all")])
def test_runs_that_do_not_belong_together_are_refused(tmp_path, capsys, seed, change, message):
    a = write_run(tmp_path / "a/seed1/delta_dp_p", 1, 100, delta="dp_p")
    b = write_run(tmp_path / f"b/seed{seed}/delta_dp_p", seed, 100, delta="dp_p", **change)
    flags = ["--collect", str(tmp_path / "a"), str(tmp_path / "b")]
    assert table_of(tmp_path / "out", *flags) == 2 and not (tmp_path / "out").exists()
    assert message.format(a=a, b=b) in capsys.readouterr().err


def test_runs_on_other_data_are_refused(tmp_path, capsys):
    """Whatever the folders are called: one that is prepared anew may hold another text."""
    for seed in (1, 2):
        run = write_run(tmp_path / f"seed{seed}/flash_bf16", seed, 100)
    assert table_of(tmp_path, "--collect", arms=("flash_bf16",))["summary"][0]["finished"] == 2
    header = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(header | {"data": {"sha256": "d2"}}))
    assert table_of(tmp_path, "--collect", arms=("flash_bf16",)) == 2
    assert "has training data with SHA-256=d2, and flash_bf16 of seed 1" in capsys.readouterr().err


def test_what_changes_no_step_may_differ(tmp_path):
    """Evaluations, and what an unset monitor would do, whose defaults change from commit to commit."""
    more = [{"eval_interval": 500}, {"eval_interval": 2500, "monitor": "off", "monitor_remedy": "stabilized"},
            {"monitor": "off", "monitor_remedy": "delta=dp_p"}]
    for seed, config in enumerate(more, 1):
        write_run(tmp_path / f"seed{seed}/flash_bf16", seed, 100, **config)
    assert table_of(tmp_path, "--collect", seeds=(1, 2, 3), arms=("flash_bf16",))["summary"][0]["finished"] == 3
    write_run(tmp_path / "seed4/flash_bf16", 4, 100, monitor="switch", monitor_remedy="stabilized")
    assert table_of(tmp_path, "--collect", seeds=(3, 4), arms=("flash_bf16",)) == 2


@pytest.mark.parametrize("filed, seed, header, message", [
    ("delta_dp_p", 1, {"delta": "do_o"}, "has delta=do_o, not dp_p; file it as what it is, or leave it out"),
    ("delta_dp_p", 1, {"delta": None}, "has delta=do_o, not dp_p; file it"),
    ("flash_bf16", 2, {"seed": 1}, "has seed=1, not 2; file it"),
    ("delta_dp_p", 1, None, "has no run.json or delta_dp_p.run.json, which says what it ran with; leave it out")])
def test_runs_filed_as_what_they_are_not_are_refused(tmp_path, capsys, filed, seed, header, message):
    write_run(tmp_path / "a/seed1/flash_bf16", 1, 100)
    run = write_run(tmp_path / f"a/seed{seed}/{filed}", **{"seed": seed, "steps": 100} | (header or {}))
    if header is None:
        (run / "run.json").unlink()
    assert table_of(tmp_path / "out", "--collect", str(tmp_path / "a")) == 2 and not (tmp_path / "out").exists()
    assert f"{filed} of seed {seed}, in {run}, {message}" in capsys.readouterr().err


def test_a_run_that_went_on_as_another_arm_is_refused(tmp_path, capsys):
    """But not for a session whose steps are past the table's or were made again, nor for settings that change none."""
    run = write_run(tmp_path / "seed1/flash_bf16", 1, 100)
    header = json.loads((run / "run.json").read_text())

    def table(steps, *sessions):
        changes = [{"changed": {"start_step": at, "config": {"init_from": "resume"} | more}} for at, more in sessions]
        (run / "run.json").write_text(json.dumps(header | {"sessions": [{}, *changes]}))
        return table_of(tmp_path, "--collect", steps=steps, seeds=(1,), arms=("flash_bf16",))

    other = (60, {"delta": "dp_p", "smooth_k": 1.0})
    assert table(100, other) == table(100, other, (70, {})) == table(61, other) == 2
    assert (f"flash_bf16 of seed 1, in {run}, went on with delta=dp_p, smooth_k=1.0 from step 60: it is of no one arm; "
            "leave it out") in capsys.readouterr().err
    for steps, *sessions in ((60, other), (100, other, (60, {})), (100, (60, {"max_iters": 200, "eval_iters": 1}))):
        assert table(steps, *sessions)["summary"][0]["finished"] == 1


def test_whether_w_q_of_a_run_without_probes_ran_away_is_not_known(tmp_path):
    write_run(tmp_path / "seed1/flash_bf16", 1, 100)
    write_run(tmp_path / "seed2/flash_bf16", 2, 100, probe=False)
    found = table_of(tmp_path, "--collect", arms=("flash_bf16",))
    assert [(r["failed"], r["ran_away"]) for r in found["rows"]] == [(False, True), (False, None)]
    assert [found["summary"][0][key] for key in ("finished", "ran_away_or_finished")] == [2, 1]


def test_odd_folders(tmp_path, capsys):
    """Names that are no seeds, a seed given twice, a run that began after --steps, and a log that was cut off."""
    write_run(tmp_path / "seed1/flash_bf16", 1, 100, fails_at=70)
    write_run(tmp_path / "seed1old/flash_bf16", 1, 100)
    late = write_run(tmp_path / "seed2/flash_bf16", 2, 200) / "metrics.jsonl"
    late.write_text("".join(late.read_text().splitlines(keepends=True)[150:]))
    found = table_of(tmp_path, "--collect", seeds=(1, 1, 2), arms=("flash_bf16",))
    assert [(r["seed"], r["failed"]) for r in found["rows"]] == [(1, True), (2, None)]
    assert (found["flags"]["seeds"], found["summary"][0]["finished"]) == ([1, 2], 1)
    kept, = collect(tmp_path / "seed1/flash_bf16", tmp_path / "seed3", order=False)[:1]
    kept.write_bytes(kept.read_bytes()[:-20])
    assert table_of(tmp_path, "--collect", seeds=(3,)) == 2
    assert f"{kept} cannot be read: Compressed file ended" in capsys.readouterr().err


def test_a_folder_without_runs_and_runs_left_out_are_told(tmp_path, capsys):
    assert table_of(tmp_path, "--collect") == 2
    assert f"{tmp_path} has no runs, seedN/ARM/metrics.jsonl" in capsys.readouterr().err
    write_run(tmp_path / "seed1/flash_bf16", 1, 100)
    write_run(tmp_path / "seed9/pv_fp32", 9, 100)
    assert len(table_of(tmp_path, "--collect")["rows"]) == 4
    assert capsys.readouterr().err == "left out, as not of --arms and --seeds: seed9/pv_fp32\n"
    table = (tmp_path / "isolation.json").read_bytes()
    assert table_of(tmp_path, "--collect", seeds=(7,)) == 2 and (tmp_path / "isolation.json").read_bytes() == table
    assert "none of the runs is of --arms and --seeds; there are seed1/flash_bf16 seed9/pv_fp32" in (
        capsys.readouterr().err)


def test_thinned_logs_give_the_failing_run_its_warning_and_its_step():
    run = load_run(ROOT / "results/mini/seed1_b64_flash_bf16.jsonl.xz")
    less = dataclasses.replace(run, records=thin(run.records))
    assert less.records != run.records
    assert by_run(less, Config().monitor_thresholds) == by_run(run, Config().monitor_thresholds)
    assert row("a", 1, less, propose(less), 9999) == row("a", 1, run, propose(run), 9999)


def test_thinned_logs_keep_losses_and_ties_and_may_be_thinned_again(tmp_path):
    run = load_run(write_run(tmp_path / "run", 1, 1001))
    collect(tmp_path / "run", tmp_path, order=False, thinned=True)
    kept = load_run(tmp_path / "run.jsonl.xz")
    for key in ("loss", "probe/wq_norm_head/layer1", "probe/ties_head/layer2"):
        assert kept.series(key) == run.series(key)
    assert kept.series("probe/norm_W_Q/layer0")[0] == [0, 500, 1000] and thin(kept.records) == kept.records
    assert kept.series("probe/norm_W_Q/layer0")[1][1] == pytest.approx(run.series("probe/norm_W_Q/layer0")[1][25], 1e-5)


def test_a_grid_has_a_row_of_panels_a_corpus(tmp_path):
    for corpus in ("novels", "web"):
        write_run(tmp_path / f"seed1/scores_pv_{corpus}_0.003_32", 1, 100, dataset=corpus, batch_size=32,
                  learning_rate=3e-3, delta="dp_p", fails_at=70 if corpus == "web" else None)
    argv = ["--datasets", "x/novels", "y/web", "--learning_rates", "3e-3", "--batch_sizes", "32", "--arms", "scores_pv",
            "--steps", "100", "--out", str(tmp_path), "--collect"]
    assert grid.main(argv) == 0
    found = json.loads((tmp_path / "grid.json").read_text())
    assert [r["step_of_failure"] for r in found["rows"]] == [None, 70]
    assert found["flags"]["datasets"] == ["novels", "web"] and (tmp_path / "grid.png").stat().st_size > 5000
    with pytest.raises(SystemExit):
        grid.main(["--datasets", "a/novels", "b/novels"])


def test_an_arm_that_waits_starts_as_soon_as_what_it_waits_for_has_ended(tmp_path, monkeypatch):
    """Two places: seed 2's late arm does not wait for seed 1, and no place is empty while anything can run."""
    clock, begun, ended, lasts = [0], {}, {}, {"first1": 9, "first2": 2, "late1": 2, "late2": 2, "other": 3, "lost": 1}

    class Process:
        returncode = 0

        def __init__(self, command, **_):
            self.name = command[-1].rsplit("/", 1)[1]
            begun[self.name] = clock[0]

        def poll(self):
            if clock[0] < begun[self.name] + lasts[self.name]:
                return None
            ended[self.name] = clock[0]
            return 0

    monkeypatch.setattr(arms.subprocess, "Popen", Process)
    monkeypatch.setattr(arms.time, "sleep", lambda _: clock.__setitem__(0, clock[0] + 1))
    queue = {"first1": ["x"], "first2": ["x"], **{f"late{i}": lambda i=i: ["x"] if f"first{i}" in ended else None
                                                 for i in (1, 2)}, "other": ["x"], "never": lambda: None}
    codes = arms.run_arms(queue, tmp_path, 2, 1, say=lambda *_, **__: None)
    assert begun == {"first1": 0, "first2": 0, "late2": 2, "other": 4, "late1": 9} and "never" not in codes


@pytest.mark.parametrize("gpus, lasts, begun_at", [
    (1, 100, {"a": 0, "b": 76, "c": 152}), (0, 100, {"a": 0, "b": 100, "c": 200}), (2, 100, {"a": 0, "b": 0, "c": 76}),
    (1, 20, {"a": 0, "b": 1, "c": 20})])
def test_the_next_arm_compiles_in_the_last_seconds_of_another(tmp_path, monkeypatch, gpus, lasts, begun_at):
    """One arm a place, but on GPUs the next starts AHEAD_S = 25 before one ends, on its GPU; on a CPU it waits. Never
    more than one ahead, however short they are: each takes its part of the GPU's memory."""
    clock, begun, slots = [0], {}, {}

    class Process:
        returncode = 0

        def __init__(self, command, env, **_):
            self.name = command[-1].rsplit("/", 1)[1]
            begun[self.name], slots[self.name] = clock[0], env.get("CUDA_VISIBLE_DEVICES")

        def poll(self):
            return None if clock[0] < begun[self.name] + lasts else 0

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(arms.subprocess, "Popen", Process)
    monkeypatch.setattr(arms.time, "sleep", lambda _: clock.__setitem__(0, clock[0] + 1))
    monkeypatch.setattr(arms, "seconds_left", lambda run, steps, since: begun[run.name] + lasts - clock[0])
    arms.run_arms({name: ["x"] for name in "abc"}, tmp_path, max(gpus, 1), gpus, say=lambda *_, **__: None, steps=9)
    assert begun == begun_at
    if gpus == 2:
        assert (slots["a"], slots["b"]) == ("0", "1") and slots["c"] in slots["a"] + slots["b"]


def test_seconds_left_are_those_of_the_last_steps(tmp_path):
    """By the rate of what is at the end of the log, the line that is being written left out; inf before two losses."""
    assert arms.seconds_left(tmp_path, 100) == math.inf
    log = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": 3.0, "time": 1e9 + 30 * min(step, 50) + max(0, step - 50) / 2}) + "\n"
             for step in range(0, 80, 10)]
    log.write_text(lines[0])
    assert arms.seconds_left(tmp_path, 100) == math.inf
    log.write_text("".join(lines) + '{"step": 80, "lo')
    assert arms.seconds_left(tmp_path, 100) > 500
    log.write_text(lines[5] + json.dumps({"step": 60, "pad": "x" * arms.TAIL}) + "\n" + "".join(lines[6:]) + '{"step"')
    assert arms.seconds_left(tmp_path, 100) == pytest.approx(15)
    assert arms.seconds_left(tmp_path, 100, since=time.time()) == math.inf  # of an earlier session
    log.write_text("".join(lines).replace('"time": ', '"time": "x", "was": '))
    assert arms.seconds_left(tmp_path, 100) == math.inf


@pytest.mark.parametrize("known", [True, False])
def test_an_arm_that_waits_is_refused_where_it_began_with_other_flags(tmp_path, monkeypatch, known):
    """Before anything is started where its flags are known by then, else when they are; what runs then is ended."""
    started, ended = [], []
    process = SimpleNamespace(poll=lambda: None, terminate=lambda: ended.append("first"), wait=lambda: 143)
    monkeypatch.setattr(arms.subprocess, "Popen", lambda *_, **__: started.append("first") or process)
    write_run(tmp_path / "late", Config().seed, 5, batch_size=32)
    queue = {"first": [], "late": lambda: ["--batch_size=64"] if known or started else None}
    with pytest.raises(ConfigError, match="late was begun with batch_size=32, and this command says 64; give the same"):
        arms.run_arms(queue, tmp_path, 2, 1, say=lambda *_, **__: None)
    assert started == ended == ([] if known else ["first"])


@pytest.mark.parametrize("key, before, unread, read", [
    ("monitor_row_max", 0.0, [], ["--monitor=warn"]), ("monitor_remedy", "stabilized", [], ["--monitor=switch"]),
    ("muon_momentum", 0.5, [], ["--optimizer=muon"]), ("probe_sequences", 1, [], ["--probe_interval=100"]),
    ("compile_mode", "reduce-overhead", ["--compile=False"], []), ("min_lr", 0.0, ["--decay_lr=False"], [])])
def test_a_run_that_began_under_another_default_goes_on_where_nothing_reads_it(tmp_path, key, before, unread, read):
    """run.json holds every key as it was then."""
    for flags, refused in ((unread, False), (read, True)):
        run = write_run(tmp_path / str(refused), steps=5, **as_dict(load(flags)) | {key: before})
        with pytest.raises(ConfigError, match=f"begun with {key}=") if refused else contextlib.nullcontext():
            arms.check_begun(run, flags)


def test_a_run_of_a_commit_without_a_key_does_not_go_on_with_it(tmp_path):
    before = {key: value for key, value in as_dict(load([])).items() if key != "smooth_k"}
    run = write_run(tmp_path / "run", steps=5, **before)
    arms.check_begun(run, [])
    arms.check_begun(write_run(tmp_path / "models", steps=5, **before, smooth_k=False), [])  # as of its commit
    with pytest.raises(ConfigError, match=r"begun with smooth_k=0\.0, and this command says 1\.0"):
        arms.check_begun(run, ["--smooth_k=1"])


def test_a_run_goes_on_with_the_settings_that_made_its_newest_checkpoint(tmp_path):
    """Neither with those that it was begun with, where a later session had others, nor with those of one that ended
    before it had made a step."""
    run = write_run(tmp_path / "run", steps=10, **as_dict(load([])))
    header = json.loads((run / "run.json").read_text())
    header |= {"start_step": 0, "sessions": [
        {}, {"changed": {"config": {"learning_rate": 0.5, "init_from": "resume"}, "start_step": 4}},
        {"changed": {"config": {"learning_rate": 0.25}, "start_step": 8}}]}
    (run / "run.json").write_text(json.dumps(header))
    for step, goes_on, others in ((4, "0.001", ("0.5", "0.25")), (8, "0.5", ("0.001", "0.25")),
                                  (10, "0.25", ("0.5", "0.001"))):
        (run / f"ckpt_{step:08d}.pt").touch()
        arms.check_begun(run, [f"--learning_rate={goes_on}"])
        how = "was begun" if step == 4 else "went on"
        for rate in others:
            with pytest.raises(ConfigError, match=f"{how} with learning_rate={goes_on}, and this command says {rate};"):
                arms.check_begun(run, [f"--learning_rate={rate}"])


def test_a_bare_collect_makes_the_table_that_is_there_again(tmp_path, capsys):
    write_run(tmp_path / "seed2/flash_bf16", 2, 100, fails_at=70)
    found = table_of(tmp_path, "--collect", seeds=(2,), arms=("flash_bf16",))
    assert rates.main("", isolate.ARMS, "", "isolation.json", ["--out", str(tmp_path), "--collect"]) == 0
    assert json.loads((tmp_path / "isolation.json").read_text()) == found and len(found["rows"]) == 1
    wider = table_of(tmp_path, "--collect", seeds=(2, 3), arms=("flash_bf16",))
    assert len(wider["rows"]) == 2, "what is given wins"
    for text, words in (("[]", "is no table of this script"),
                        (json.dumps({"flags": found["flags"] | {"arms": ["gone"]}}), "not known any more: gone")):
        (tmp_path / "isolation.json").write_text(text)
        with pytest.raises(SystemExit):
            rates.main("", isolate.ARMS, "", "isolation.json", ["--out", str(tmp_path), "--collect"])
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "results/mini/rates").glob("*.json")), ids=lambda path: path.stem)
def test_tables_in_results_are_those_of_the_logs_beside_them(path, tmp_path):
    """The command that results/ documents, with the flags that each table holds, on links to the kept logs."""
    kept = json.loads(path.read_text())
    argv = ["--out", str(tmp_path), "--collect"]
    for name, values in kept["flags"].items():
        argv += [f"--{name}", *map(str, values if isinstance(values, list) else [values])]
    for seed in path.parent.glob("seed*"):
        (tmp_path / seed.name).symlink_to(seed)
    if path.stem == "grid":
        assert grid.main(argv) == 0
    else:
        module = {"isolation": isolate, "cures": cures}[path.stem]
        assert rates.main("", module.ARMS, "", path.name, argv) == 0
    assert (tmp_path / path.name).read_text() == path.read_text()
