"""Every script says that it cannot write what it is to write before it reads or computes anything."""

import errno
import importlib
import io
import re
import sys
from pathlib import Path

import pytest
import torch

from scripts.targets import check_targets

SCRIPTS = Path(__file__).parents[2] / "scripts"
# By script: what else its command needs, none of which exists, and the flags that name a FILE or a FOLDER.
FLAGS = {"bench_attention": ([], ["--out=FILE"]),
         "bench_throughput": (["none.toml"], ["--out=FILE"]),
         "bench_train": (["none.toml"], ["--json=FILE"]),
         "check_determinism": (["none.toml"], ["--out=FOLDER"]),
         "collect": (["none"], ["--out=FOLDER"]),
         "compare": (["none"], ["--output=FILE.png", "--layers=FILE.png", "--json=FILE"]),
         "delta_bias": (["none", "--device=cpu"], ["--out=FILE"]),
         "diagnose": (["none", "--device=cpu"], ["--out=FOLDER", "--save-scene=FILE"]),
         "diagnose_hf": (["none", "--text=none", "--device=cpu"], ["--out=FOLDER"]),
         "export_hf": (["none"], ["FOLDER"]),
         "grid": (["--datasets", "none"], ["--out=FOLDER"]),
         "monitor": (["none"], ["--json=FILE"]),
         "reproduce_mini": (["--dataset=none"], ["--out=FOLDER"]),
         "row_sums": (["--arms=none"], ["--out=FILE"])}


def test_which_they_are():
    writes = r'add_argument\("(--?o|--out|--json|--layers|--save-scene|out)", |from scripts.rates import .*\bparser\b'
    assert {path.stem for path in SCRIPTS.glob("*.py") if re.search(writes, path.read_text())} - {"rates"} == set(FLAGS)


@pytest.mark.parametrize("name, flag", [(name, flag) for name, (_, flags) in FLAGS.items() for flag in flags])
def test_told_before_anything_else(name, flag, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    module, (others, _) = importlib.import_module(f"scripts.{name}"), FLAGS[name]
    (tmp_path / "file").touch()
    (tmp_path / "folder.png").mkdir()
    kind = "FILE" if "FILE" in flag else "FOLDER"
    for target, at, what in ((tmp_path / "file/below", "file", "no"), (tmp_path / "file/b/c", "file", "no"),
                             *([(tmp_path / "folder", "folder.png", "a")] if "FILE" in flag else [])):
        target = target.with_suffix(".png") if "png" in flag or kind == "FILE" else target
        try:
            code, said = module.main([*others, re.sub(r"(FILE|FOLDER)(\.png)?", str(target), flag)]), ""
        except (OSError, SystemExit) as error:  # bench_*.py and check_determinism.py, whose last lines tell it
            code, said = 2, str(error)
        said += capsys.readouterr().err
        words = rf"{target}(/grid.json)? cannot be written: {tmp_path / at} is {what} folder"
        assert code == 2 and re.search(words, said), said
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder.png"}


@pytest.mark.parametrize("name, flag", [(name, flag) for name, (_, flags) in FLAGS.items() for flag in flags])
def test_an_empty_name_is_none(name, flag, tmp_path, monkeypatch, capsys):
    """It would be the working folder, or as if it was not given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"scripts.{name}").main([*FLAGS[name][0], re.sub(r"(FILE|FOLDER)(\.png)?", "", flag)])
    assert stop.value.code == 2 and "'' is empty; the working folder is ." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name, argv", [
    ("collect", ["{kept}/seed1_b64_flash_bf16.jsonl.xz", "{kept}/seed1_b64_delta_dp_p.jsonl.xz", "--out={out}"]),
    ("compare", ["{kept}/seed1_b64_flash_bf16.jsonl.xz", "-o={out}/a.png", "--layers={out}/b.png",
                 "--json={out}/c.json"]),
    ("monitor", ["{kept}/seed1_b64_flash_bf16.jsonl.xz", "--json={out}/a.json"]),
    ("row_sums", ["--device=cpu", "--shape", "1", "1", "16", "16", "--arms=standard", "--out={out}/a.json"]),
    ("grid", ["--collect", "--out={out}"])])
def test_all_is_written_before_it_is_told(name, argv, tmp_path, monkeypatch):
    """Whoever reads may stop before the end, as head does."""
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    argv, files = [arg.format(kept=SCRIPTS.parent / "results/mini", out=tmp_path) for arg in argv], 4
    if name == "grid":  # as isolate and cures do
        module = importlib.import_module("scripts.rates")
        monkeypatch.setattr(module, "collect_experiment", lambda *_: {"summary": [{"arm": "a", "begun": 0}],
                                                                      "errors": []})
        monkeypatch.setattr("scripts.grid.figure", lambda _, found, path: path.touch())
        files = 2
    elif name != "collect":
        files = sum("{out}" in arg or str(tmp_path) in arg for arg in argv)
    monkeypatch.setattr(sys, "stdout", Closed())
    assert importlib.import_module(f"scripts.{name}").main(argv) == 2
    assert len(list(tmp_path.iterdir())) == files


def test_what_may_not_be_written_to(tmp_path, monkeypatch):
    check_targets(None, tmp_path / "a/b.json", tmp_path / "b.json", folders=(tmp_path, tmp_path / "c/d"))
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write everywhere
    for files, folders in (((tmp_path / "a/b",), ()), ((None, tmp_path / "b"), ()), ((), (tmp_path,))):
        with pytest.raises(OSError, match=f"{tmp_path} may not be written to"):
            check_targets(*files, folders=folders)


def test_two_files_of_one_name_and_what_belongs_to_a_run(tmp_path):
    with pytest.raises(OSError, match=f"{tmp_path}/a and {tmp_path}/b/../a are one file"):
        check_targets(tmp_path / "a", None, f"{tmp_path}/b/../a")
    for name in ("run.json", "a.run.json", "metrics.jsonl", "a.jsonl.xz", "order.bin", "order.switches.json",
                 "ckpt_00000001.pt"):
        check_targets(tmp_path / name)
        (tmp_path / name).touch()
        with pytest.raises(OSError, match=f"{name} cannot be written: it is there and belongs to a run"):
            check_targets(tmp_path / name)
