"""Only runs of one order are compared; the numbers in table, JSON and plot are those of the logs."""

import json
import lzma
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from config import as_dict, from_dict
from metrics import Metrics, read_run
from replay.order import Header, Recorder
from scripts import monitor
from scripts.compare import UNCHECKED, _last_and_largest, compare, main, plot, plot_layers, table
from scripts.monitor import first_alarm
from scripts.outcomes import row
from scripts.runs import CompareError, common_steps, difference, load_run, load_runs

ROOT = Path(__file__).resolve().parents[2]


def make_run(folder: Path, losses, *, seed=0, rows=None, keep_order=True, data="ab" * 32, probes=True,
             name=None, runs_away_at=math.inf) -> Path:
    """A finished run as train.py leaves it: order file, run.json and metrics.jsonl. W_Q of head 1 of layer 1 has four
    times the norm of the others from step `runs_away_at` on."""
    header = Header(dataset="corpus", n_tokens=10_000, sha256=data, block_size=8, sequences_per_step=4, seed=seed)
    with Recorder(folder / "order.bin", header) as recorder:
        for step in range(len(losses) if rows is None else rows):
            recorder.append(step, np.random.default_rng((seed, step)).integers(0, header.starts, 4))
        order = {"mode": "recorded", "path": str(folder / "order.bin"), "rows": recorder.rows,
                 "sha256": recorder.sha256()}
    if not keep_order:
        (folder / "order.bin").unlink()
    info = {"name": name or folder.name, "attention": ["flash_bf16 ..."] * 2, "order": order, "n_params": 7}
    metrics = Metrics(folder, {"max_iters": len(losses)}, info)
    for step, loss in enumerate(losses):
        record = {"step": step, "loss": loss, "grad_norm": 1 + step / 10}
        if probes and step % 2 == 0:
            record |= {"probe/ties/layer0": 0.1, "probe/ties/layer1": step / 100, "probe/wq_norm/layer1": 3.0 + step,
                       "probe/ties_head/layer1": [0.0, step / 50], "probe/wq_norm_head/layer0": [1.0, 1.0],
                       "probe/wq_norm_head/layer1": [1.0, 4.0 if step >= runs_away_at else 1.0]}
        metrics.log(record)
    metrics.log({"step": len(losses), "val_loss": losses[-1] + 0.5})
    metrics.close()
    return folder


@pytest.fixture
def pair(tmp_path):
    a = make_run(tmp_path / "a", [4.0, 3.0, 2.5, 2.0, 1.5])
    return a, make_run(tmp_path / "b", [4.0, 3.25, 2.25, 2.5, math.nan])


def test_a_run_that_went_on_with_other_settings_says_so(pair, tmp_path):
    """run.json's own settings are those that it began with."""
    header = json.loads((pair[1] / "run.json").read_text())
    header["config"] |= {"wandb_log": True}
    told = {"delta": "dp_p", "max_iters": 5, "wandb_run_name": "other", "collective_timeout_s": 60.0}
    header["sessions"] += [{"changed": {"start_step": 3, "config": told}}]
    (pair[1] / "run.json").write_text(json.dumps(header))
    found = compare(load_runs(pair))
    assert [row["resumed_with"] for row in found["runs"]] == [[], [{"step": 3, "delta": "dp_p"}]]
    assert "\nb went on with delta=dp_p from step 3\n" in table(found)


def test_single_steps_are_those_of_the_longest_run(pair, tmp_path):
    short = make_run(tmp_path / "short", [4.0])
    text = table(compare(load_runs([pair[0], short, pair[1]])))
    assert "step 0     step 1     step 2     step 3  step 4\nshort  +0.00e+00          -  " in text


def test_an_order_file_of_another_run_is_not_taken_for_the_runs_own(tmp_path):
    """A log that was kept names the file of its folder, where another run has gone since: the hashes count."""
    kept = []
    for name in ("a", "b"):
        run = make_run(tmp_path / name, [4.0, 3.0])
        kept.append(tmp_path / f"{name}.jsonl")
        shutil.copy(run / "metrics.jsonl", kept[-1])
        shutil.copy(run / "run.json", tmp_path / f"{name}.run.json")
        shutil.rmtree(run)
    make_run(tmp_path / "a", [4.0, 3.0], seed=1)
    assert common_steps(*load_runs(kept)) == 2
    make_run(tmp_path / "b", [4.0, 3.0], seed=1)
    assert common_steps(*load_runs(kept)) == 2
    assert common_steps(*load_runs([tmp_path / "a", tmp_path / "b"])) == 2
    with pytest.raises(CompareError, match="not comparable"):
        common_steps(*load_runs([kept[0], tmp_path / "a"]))


def test_the_largest_of_a_series_is_nan_where_one_is():
    assert str(_last_and_largest([0, 2, 4], [1.0, math.nan, 3.0])) == "{'last': 3.0, 'max': nan, 'step_of_max': 2}"
    assert _last_and_largest([0, 2, 4], [1.0, 5.0, 5.0]) == {"last": 5.0, "max": 5.0, "step_of_max": 2}


def test_numbers_are_those_of_the_logs(pair, tmp_path):
    runs = load_runs(pair)
    result = compare(runs)
    first, second = result["runs"]
    assert result["same_order"] and result["reference"] == "a" and not result["label"]
    assert first["difference"]["signed"] == [0.0] * 5 and first["common_steps"] == 5
    diff = second["difference"]
    assert diff["steps"] == [0, 1, 2, 3, 4]
    assert diff["signed"][:4] == [0.0, 0.25, -0.25, 0.5] and math.isnan(diff["signed"][4])
    assert diff["absolute"][:4] == [0.0, 0.25, 0.25, 0.5]
    assert (first["final_loss"], first["final_val_loss"], first["step_of_failure"]) == (1.5, 2.0, None)
    assert second["step_of_failure"] == 4 and second["steps"] == 5 and second["max_grad_norm"] == 1.4
    assert first["ties"] == {0: {"last": 0.1, "max": 0.1, "step_of_max": 0},
                             1: {"last": 0.04, "max": 0.04, "step_of_max": 4}}
    assert first["wq_norm"] == {1: {"last": 7.0, "max": 7.0, "step_of_max": 4}}
    assert first["attention"] == ["flash_bf16 ..."] * 2

    text = table(result)
    row = next(line for line in text.splitlines() if line.startswith("b "))
    assert row.split() == ["b", "5", "nan", "nan", "+nan", "nan", "nan", "1.4", "4", "-", "-"]
    assert "layer 1" in text and "0.0400 (0.0400)" in text and "7.00 (7.00)" in text


def test_command_writes_json_and_a_plot(pair, tmp_path):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    png, report = tmp_path / "out" / "c.png", tmp_path / "out" / "c.json"
    done = subprocess.run([sys.executable, ROOT / "scripts" / "compare.py", *pair, "-o", png, "--json", report],
                          cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "reference: a" in done.stdout
    result = json.loads(report.read_text(), parse_constant=refuse)
    assert result["runs"][1]["difference"]["signed"] == [0.0, 0.25, -0.25, 0.5, "NaN"]
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000


def test_where_w_q_ran_away_and_where_nobody_looked(tmp_path):
    """At the first probe that sees it, whatever becomes of the loss; step and layer in the JSON."""
    losses = [3.0, 2.5, 2.0, 1.5, math.nan]
    runs = load_runs([make_run(tmp_path / "away", losses, runs_away_at=1), make_run(tmp_path / "not", losses),
                      make_run(tmp_path / "bare", losses, probes=False)])
    result = compare(runs)
    keys = ("ran_away", "step_of_runaway", "layer_of_runaway", "step_of_failure")
    assert [[row[key] for key in keys] for row in result["runs"]] == [
        [True, 2, 1, 4], [False, None, None, 4], [None, None, None, 4]]
    head, *rows = table(result).splitlines()[1:5]
    assert head.endswith("failed at  W_Q ran away  scores ran away")
    assert [re.split("  +", row)[-2:] for row in rows] == [["2, layer 1", "-"], ["-", "-"], ["not probed"] * 2]


def test_one_definition_of_the_runaway():
    """compare.py, the tables over seeds and the monitor's rule name the same step."""
    for name, failure, step, scores, layer in (("seed1_b64_flash_bf16", 8030, 3800, 3900, 1),
                                               ("seed1_b64_delta_dp_p", *[None] * 4)):
        run = load_run(ROOT / f"results/mini/{name}.jsonl.xz")
        (found,) = compare([run])["runs"]
        kept = row("arm", 1, run, None, run.steps)
        assert (found["step_of_failure"], found["step_of_runaway"], found["layer_of_runaway"]) == (failure, step, layer)
        assert (found["step_of_scores"], found["layer_of_scores"]) == (scores, layer)
        for key in ("ran_away", "step_of_runaway", "scores_ran_away", "step_of_scores"):
            assert found[key] == kept[key]
        alarm = first_alarm(run.records, {"wq_ratio": 3.0})
        assert (alarm and alarm.step) == step


def test_lines_differ_without_colour_and_axes_have_units(pair, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("scripts.compare.save", lambda figure, path, dpi: drawn.append(figure))
    runs = load_runs([pair[0]] * 11)
    plot(runs, compare(runs), tmp_path / "c.png")
    axes = drawn[0].axes
    looks = [(line.get_linestyle(), str(line._dash_pattern), line.get_marker()) for line in axes[0].get_lines()]
    assert len(set(looks)) == 11
    labels = [axis.get_ylabel() for axis in axes]
    assert len(axes) == 5 and all(labels) and "nats/token" in labels[0] and axes[-1].get_xlabel() == "optimizer step"


def test_layers_are_drawn_a_column_a_run(pair, tmp_path, monkeypatch):
    """Of a head's list the largest value counts; a line where W_Q ran away, in its panel alone and without a layer's
    number; a panel without values says so; a run without probes is refused, as is an unknown picture format."""
    drawn = []
    monkeypatch.setattr("scripts.compare.save", lambda figure, path, dpi: drawn.append(figure))
    away = make_run(tmp_path / "away", [4.0, 3.0, 2.5, 2.0, 1.5], runs_away_at=2)
    plot_layers(load_runs([*pair, away]), tmp_path / "layers.png")
    grid = np.array(drawn[0].axes).reshape(3, 3)
    assert [[len(axis.lines) for axis in line] for line in grid] == [[1, 1, 1], [1, 1, 2], [1, 1, 1]]
    assert grid[1, 2].lines[-1].get_xdata() == [2, 2] and [text.get_text() for text in grid[1, 2].texts] == ["1"]
    assert [axis.get_title() for axis in grid[1]] == ["", "", "dotted: ran away at step 2, layer 1"]
    ties = {line.get_label(): line for line in grid[2, 1].lines}
    assert ties["layer 1"].get_ydata().tolist() == [0.0, 2 / 50, 4 / 50]
    norms = {line.get_label(): line for line in grid[1, 0].lines}
    assert norms["layer 1"].get_ydata().tolist() == [3.0, 5.0, 7.0] and "step" in grid[2, 0].get_xlabel()
    bare = make_run(tmp_path / "bare", [2.0, 1.0], probes=False)
    plot_layers(load_runs([pair[0], bare]), tmp_path / "layers.png")
    grid = np.array(drawn[1].axes).reshape(3, 2)
    assert [[text.get_text() for text in axis.texts] for axis in grid[:, 1]] == [[], ["not logged"], ["not logged"]]
    monkeypatch.undo()
    assert main([str(bare), "--layers", str(tmp_path / "none.png")]) == 2 and not (tmp_path / "none.png").exists()
    assert main([str(pair[0]), "--layers", str(tmp_path / "layers.txt")]) == 2


def test_differences_that_cancel_are_not_small(tmp_path):
    runs = load_runs([make_run(tmp_path / "a", [4.0, 3.0, 2.0, 1.0]), make_run(tmp_path / "b", [4.0, 3.25, 1.25, 1.5])])
    diff = compare(runs)["runs"][1]["difference"]
    assert (diff["mean_signed"], diff["mean_absolute"], diff["max_absolute"]) == (0.0, 0.375, 0.75)


def test_runs_without_probes_have_no_empty_panels(tmp_path):
    run = load_run(make_run(tmp_path / "a", [2.0, 1.0], probes=False))
    result = compare([run])
    assert result["runs"][0]["ties"] == {} and "layer" not in table(result)
    plot([run], result, tmp_path / "c.png")


def test_a_shorter_run_is_compared_on_the_common_steps(tmp_path):
    long = load_run(make_run(tmp_path / "long", [3.0 - i / 10 for i in range(10)]))
    short = load_run(make_run(tmp_path / "short", [3.0, 3.0, 3.0]))
    assert long.info["order"]["sha256"] != short.info["order"]["sha256"]
    assert common_steps(long, short) == common_steps(short, long) == 3
    steps, signed = difference(long, short, 3)
    assert steps == [0, 1, 2] and signed == pytest.approx([0, 0.1, 0.2])
    torn = load_run(make_run(tmp_path / "torn", [3.0] * 6, rows=4))  # rows are what counts, not records
    assert compare([long, torn])["runs"][1]["difference"]["steps"] == [0, 1, 2, 3]


def test_different_orders_are_refused_with_one_sentence(tmp_path, capsys):
    a, b = make_run(tmp_path / "a", [3.0, 2.0]), make_run(tmp_path / "b", [3.0, 2.0], seed=1)
    assert main([str(a), str(b), "--json", str(tmp_path / "no.json")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("compare: a and b are not comparable: their batch orders differ from step 0 on")
    assert captured.err.count("\n") == 1 and captured.out == "" and not (tmp_path / "no.json").exists()


def test_different_orders_can_be_allowed_and_are_labelled(tmp_path, capsys):
    a, b = make_run(tmp_path / "a", [3.0, 2.0]), make_run(tmp_path / "b", [3.5, 2.0, 1.0], seed=1)
    assert main([str(a), str(b), "--allow_different_orders", "--json", str(tmp_path / "c.json"),
                 "-o", str(tmp_path / "c.png")]) == 0
    assert UNCHECKED in capsys.readouterr().out
    result = json.loads((tmp_path / "c.json").read_text())
    assert result["same_order"] is False and result["label"] == UNCHECKED
    assert result["runs"][1]["difference"]["signed"] == [0.5, 0.0]


def test_other_data_in_the_same_order_is_refused(tmp_path):
    runs = load_runs([make_run(tmp_path / "a", [3.0]), make_run(tmp_path / "b", [3.0], data="cd" * 32)])
    with pytest.raises(CompareError, match=r"their orders are of training data with SHA-256 abab.* and cdcd"):
        compare(runs)


def test_without_order_files_the_hashes_decide(tmp_path):
    a, b = (make_run(tmp_path / name, [3.0, 2.0], keep_order=False) for name in "ab")
    assert compare(load_runs([a, b]))["same_order"]
    other = make_run(tmp_path / "other", [3.0, 2.0], seed=1, keep_order=False)
    with pytest.raises(CompareError, match=r"a has order hash [0-9a-f]{12} and other has order hash [0-9a-f]{12}"):
        compare(load_runs([a, other]))
    (b / "run.json").unlink()
    with pytest.raises(CompareError, match="the order of b was not kept"):
        compare(load_runs([a, b]))


def test_orders_drawn_from_one_seed_are_one_order_whatever_their_length(tmp_path):
    """run.json's hash is of all rows, so it differs where one run stopped earlier."""
    runs = [load_run(make_run(tmp_path / name, losses, keep_order=False))
            for name, losses in (("long", [3.0, 2.0, 1.0]), ("short", [3.0, 2.5]))]
    with pytest.raises(CompareError, match="order hash"):
        common_steps(*runs)
    drawn = {"seed": 1, "block_size": 8, "batch_size": 4, "gradient_accumulation_steps": 1}
    for run in runs:
        run.info |= {"config": dict(drawn), "data": {"sha256": "ab", "tokens": 10_000}}
    assert common_steps(*runs) == 2
    runs[1].info["config"] |= {"batch_size": 2, "gradient_accumulation_steps": 2}  # a step has as many sequences
    assert common_steps(*runs) == 2
    for place, name in [*(("config", name) for name in drawn), ("data", "sha256"), ("data", "tokens")]:
        own = runs[1].info[place]
        for other in ({name: own[name] * 2}, {name: None}):
            runs[1].info[place] = own | other
            with pytest.raises(CompareError, match="order hash"):
                common_steps(*runs)
        runs[1].info[place] = own
    runs[1].info["order"]["mode"] = "replayed"  # of whatever file
    with pytest.raises(CompareError, match="order hash"):
        common_steps(*runs)
    for run in runs:  # two unknown orders are not one
        run.info["order"]["sha256"] = None
    with pytest.raises(CompareError, match="order of long was not kept and the order of short was not kept"):
        common_steps(*runs)


def test_a_replayed_run_finds_the_order_that_it_read(tmp_path):
    source = make_run(tmp_path / "source", [3.0, 2.0, 1.0])
    replayed = make_run(tmp_path / "replayed", [3.0, 2.5], keep_order=False)
    header = json.loads((replayed / "run.json").read_text())
    header["order"] = {"mode": "replayed", "path": str(source / "order.bin"), "rows": 3, "sha256": None}
    (replayed / "run.json").write_text(json.dumps(header))
    assert common_steps(*load_runs([source, replayed])) == 2


def test_compressed_results_with_their_headers_beside_them(tmp_path, pair):
    kept = tmp_path / "results"
    kept.mkdir()
    for run in pair:
        with lzma.open(kept / f"{run.name}_seed1.jsonl.xz", "wb") as file:
            file.write((run / "metrics.jsonl").read_bytes())
        shutil.copy(run / "run.json", kept / f"{run.name}_seed1.run.json")
        shutil.rmtree(run)
    result = compare(load_runs([kept / "a_seed1.jsonl.xz", kept / "b_seed1.jsonl.xz"]))
    assert result["runs"][1]["difference"]["signed"][:4] == [0.0, 0.25, -0.25, 0.5]


def test_runs_of_one_name_are_told_apart(tmp_path):
    runs = load_runs([make_run(tmp_path / place / "arm", [3.0]) for place in "xy"])
    assert [run.name for run in runs] == [f"arm ({tmp_path}/x/arm)", f"arm ({tmp_path}/y/arm)"]


def test_missing_and_empty_runs(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "has no metrics.jsonl" in capsys.readouterr().err
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "val_loss": 3.0}\n')
    assert main([str(tmp_path)]) == 2
    assert "has no logged loss" in capsys.readouterr().err


@pytest.mark.parametrize("header, told", [
    ("[]", "is no run's header"), ('{"order": "x"}', "has order='x', of the wrong kind"),
    ('{"config": 3}', "has config=3,"), ('{"config": null}', "has config=None,"),
    ('{"sessions": 3}', "has sessions=3,"), ('{"sessions": [3]}', "has sessions[0]=3,"),
    ('{"sessions": [{}, {"changed": null}]}', "has sessions[1].changed=None,"),
    ('{"sessions": [{"changed": {"config": 3}}]}', "has sessions[0].changed.config=3,"),
    ('{"sessions": [{"changed": {"start_step": null}}]}', "has sessions[0].changed.start_step=None,"),
    ('{"name": 3}', "has name=3,"), ('{"attention": "x"}', "has attention='x',"),
    ('{"attention": [3]}', "has attention[0]=3,"), ('{"start_step": "x"}', "has start_step='x',"),
    ('{"data": null}', "has data=None,"), ('{"data": {"tokens": "x"}}', "has data.tokens='x',"),
    ('{"order": {"sha256": 3}}', "has order.sha256=3,"), ('{"order": {"rows": "x", "sha256": "a"}}', "order.rows='x'"),
    ('{"config": {"smooth_k": "x"}}', "smooth_k='x' is not of type float | None; repair it, or move it away"),
    ('{"config": {"batch_size": "4"}}', "batch_size='4' is not of type int"),
    ('{"sessions": [{"changed": {"config": {"seed": 1.5}}}]}', "seed=1.5 is not of type int")])
def test_a_header_with_a_value_of_another_kind_is_one_sentence(tmp_path, capsys, header, told):
    """Of file, key and value, whichever script reads it."""
    run = make_run(tmp_path / "a", [3.0])
    (run / "run.json").write_text(header)
    for script in (main, monitor.main):
        assert script([str(run), str(run)]) == 2
        said = capsys.readouterr().err
        assert told in said and str(run / "run.json") in said and said.count("\n") == 1


def test_a_kept_header_of_any_commit_is_a_config():
    """What older ones wrote in another form, and what JSON has in its own, is read as what it is."""
    for path in sorted((ROOT / "results").glob("**/*.run.json")):
        was = json.loads(path.read_text())["config"]
        now = read_run(path.with_name(path.name.replace(".run.json", ".jsonl.xz")))["config"]
        assert from_dict(was, str(path)) == from_dict(now, str(path)) and was.keys() == now.keys()
        assert all(as_dict(from_dict(now, ""))[key] == value for key, value in now.items())
        assert now.get("smooth_k") is not True


def test_an_unknown_picture_format_is_refused_before_anything_is_printed(tmp_path, capsys):
    run = make_run(tmp_path / "a", [3.0])
    assert main([str(run), "-o", str(tmp_path / "x.xyz")]) == 2
    printed = capsys.readouterr()
    assert "must end in .png, .pdf or .svg" in printed.err and not printed.out
