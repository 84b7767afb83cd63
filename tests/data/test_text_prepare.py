import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import corpus, meta
from data.loader import open_tokens
from data.meta import DataError, read_meta
from data.text.prepare import cut, main, prepare, split_documents
from data.writer import locked, write_corpus

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "deep" / ".git").mkdir(parents=True)
    (folder / "b.txt").write_bytes("second \u00e9 document".encode() + b"\xff end")
    (folder / "a.md").write_bytes(b"\xef\xbb\xbffirst document")
    (folder / "deep" / "c.txt").write_text("third document of the three")
    (folder / "deep" / "image.png").write_bytes(b"\x89PNG\0\0")
    (folder / "empty").touch()
    (folder / ".hidden").write_text("hidden")
    (folder / "deep" / ".git" / "config").write_text("hidden")
    return folder


def text_of(folder, split):
    tokens = open_tokens(folder, split)
    ids = np.fromfile(tokens.path, dtype="<u2").tolist()
    documents, text = [], []
    for i in ids:
        if i == 256:
            documents.append(bytes(text).decode())
            text = []
        else:
            text.append(i)
    assert not text, "every document ends with end of text"
    return documents


def test_a_folder_becomes_documents_in_path_order(source, tmp_path):
    out = tmp_path / "out"
    meta = prepare(source, out, "bytes", val_fraction=0.01)
    train, val = text_of(out, "train"), text_of(out, "val")
    assert len(train) == 3 and len(val) == 1
    whole = ["first document", "second \u00e9 document\ufffd end", "third document of the three"]
    assert sum(t == w for t, w in zip(train, whole, strict=True)) == 2
    assert [t if t == w else t + val[0] for t, w in zip(train, whole, strict=True)] == whole
    assert meta == read_meta(out) and meta.vocab_size == 257 and meta.dtype == "uint16"
    assert meta.source["documents"] == 3 and meta.source["files_left_out"] == 3
    for split in ("train", "val"):
        tokens = open_tokens(out, split)
        assert tokens.verify() == meta.sha256[split] and tokens.n_tokens == meta.tokens[split]
    assert sorted(p.name for p in out.iterdir()) == ["meta.json", "train.bin", "val.bin"]


def test_the_same_files_give_the_same_corpus(source, tmp_path):
    first = prepare(source, tmp_path / "one", "bytes")
    assert prepare(source, tmp_path / "two", "bytes") == first
    assert prepare(source, tmp_path / "one", "bytes") == first, "and may replace itself"


def test_the_output_inside_the_source_is_not_read(source):
    first = prepare(source, source / "out", "bytes")
    assert prepare(source, source / "out", "bytes") == first


def test_validation_gets_its_fraction_of_any_mixture_of_sizes():
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = rng.integers(1, rng.choice([5, 10**6]), rng.integers(1, 60)).tolist()
        fraction = float(rng.uniform(0.001, 0.999))
        shares = split_documents(sizes, fraction)
        held_out = sum(size * (1 - share) for size, share in zip(sizes, shares, strict=True))
        assert held_out == pytest.approx(fraction * sum(sizes))
        assert sum(0 < share < 1 for share in shares) <= 1


def test_a_cut_loses_nothing_and_prefers_white_space():
    text = "several words to cut somewhere between"
    for share in np.linspace(0, 1, 50):
        head, tail = cut(text, float(share))
        assert head + tail == text and (not head or not tail or tail[0] == " " or " " not in tail)
    assert cut(text, 1.0) == (text, "") and cut(text, 0.0) == ("", text)


def test_one_file_gives_both_splits(tmp_path):
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "only.txt").write_text("word " * 1000)
    meta = prepare(tmp_path / "s", tmp_path / "out", "bytes", val_fraction=0.1)
    assert abs(meta.tokens["val"] - 501) < 6 and sum(meta.tokens.values()) == 5002


def test_ids_past_65535_are_written_as_uint32(tmp_path, source):
    tokens = [bytes([b]) for b in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    ranks = tmp_path / "ranks"
    ranks.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens)))
    (source / "z.txt").write_bytes("\U0010ffff \u00ff".encode() * 50)
    meta = prepare(source, tmp_path / "out", "gpt2", ranks, 0.2)
    assert (meta.dtype, meta.vocab_size) == ("uint32", 65793)
    train = open_tokens(tmp_path / "out", "train")
    assert train.dtype == "uint32" and train.path.stat().st_size == 4 * train.n_tokens
    x, y = train.batch(np.array([0]), train.n_tokens - 1)
    assert y.max() == 65792 and (x > 60_000).any()


@pytest.mark.parametrize("make, message", [
    (lambda f: None, "not a folder"), (lambda f: f.mkdir(), "has no text file .0 empty"),
    (lambda f: (f.mkdir(), (f / "x").write_bytes(b"\0\1")), "has no text file .1 empty"),
    (lambda f: (f.mkdir(), (f / "x").write_bytes(b" \n")), "has no text file .1 empty"),
    (lambda f: (f.mkdir(), (f / "x").write_bytes(b"x")), "train split of .* would be empty")])
def test_folders_without_text_are_errors(tmp_path, make, message, capsys):
    make(tmp_path / "source")
    assert main([str(tmp_path / "source"), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.glob("out/*.bin"))


def test_wrong_arguments(source, tmp_path, capsys):
    for fraction in ("0", "1", "-1", "nan"):
        arguments = [str(source), "--out", str(tmp_path / "o"), "--tokenizer", "bytes", f"--val_fraction={fraction}"]
        assert main(arguments) == 2
        assert "val_fraction=" in capsys.readouterr().err
    for arguments in ([str(source)], [str(source), "--default_corpus", "--out", "x"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    with pytest.raises(DataError, match="cannot be made"):
        prepare(source, source / "b.txt" / "out", "bytes")


def test_a_folder_that_may_not_be_written_to_is_told_before_the_texts_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write everywhere
    with pytest.raises(DataError, match="may not be written to; choose another with --out"), locked(tmp_path):
        pytest.fail("it went on")


def test_a_bare_name_is_a_folder_under_data(tmp_path, monkeypatch, source):
    monkeypatch.setattr(meta, "REPOSITORY", tmp_path)
    assert main([str(source), "--out", "mine", "--tokenizer", "bytes"]) == 0
    assert (tmp_path / "data" / "mine" / "meta.json").is_file()


@pytest.mark.parametrize("empty", [["", "--out", "mine"], ["--out", ""]])
def test_an_empty_name_is_not_the_embedded_corpus(tmp_path, monkeypatch, empty):
    """As of a shell variable that is not set."""
    monkeypatch.setattr(meta, "REPOSITORY", tmp_path)
    try:
        code = main(empty)
    except SystemExit as stop:
        code = stop.code
    assert code == 2 and not list(tmp_path.iterdir())


def test_two_preparations_of_one_folder_exclude_each_other(source, tmp_path):
    with locked(tmp_path / "out"), pytest.raises(DataError, match="another process is preparing"):
        prepare(source, tmp_path / "out", "bytes")


def test_a_failed_preparation_leaves_the_old_corpus(source, tmp_path):
    out = tmp_path / "out"
    meta = prepare(source, out, "bytes")

    def breaks():
        yield np.arange(10)
        raise DataError("broken")

    for arrays, vocab_size, expected in ((breaks(), 257, None), ([np.arange(258)], 257, None), ([], 257, None),
                                         ([np.arange(9)], 257, {"train": 9, "val": 4})):
        with pytest.raises(DataError):
            write_corpus(out, "bytes", vocab_size, {"train": arrays, "val": [np.arange(5)]}, {}, expected)
        assert read_meta(out) == meta and open_tokens(out, "train").verify() == meta.sha256["train"]
        assert sorted(p.name for p in out.iterdir()) == ["meta.json", "train.bin", "val.bin"]


def test_a_kill_while_files_are_renamed_is_noticed(source, tmp_path, monkeypatch):
    out, calls, real = tmp_path / "out", [], os.replace

    def killed(old, new):
        calls.append(new)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(old, new)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(source, out, "bytes")
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"meta\.json\.new is left"):
        read_meta(out)
    prepare(source, out, "bytes")
    assert open_tokens(out, "val").n_tokens > 0


def test_sigkill_at_any_moment_leaves_no_half_corpus(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for i in range(300):
        (source / f"{i}.txt").write_text(f"document {i} " * 2000)
    script = REPOSITORY / "data" / "text" / "prepare.py"
    command = [sys.executable, str(script), str(source), "--out", str(out), "--tokenizer", "bytes"]
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    whole, reference = time.perf_counter() - start, read_meta(out)
    for part in (0.5, 0.7, 0.8, 0.9):
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(whole * part)
        child.send_signal(signal.SIGKILL)
        child.wait()
        try:
            meta = read_meta(out)
        except DataError as error:
            assert "prepare it again" in str(error)
            continue
        assert meta == reference and open_tokens(out, "train").verify() == reference.sha256["train"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    assert read_meta(out) == reference and len(list(out.iterdir())) == 3


def test_the_embedded_corpus_is_enough_real_english(tmp_path):
    """The command itself, as a newcomer runs it, and without torch."""
    program = ("import runpy, sys; sys.argv = ['prepare.py', '--out', sys.argv[1]]\n"
               "try:\n    runpy.run_path('data/text/prepare.py', run_name='__main__')\n"
               "except SystemExit as stop:\n    assert stop.code == 0\n"
               "assert not {'torch', 'tiktoken', 'datasets'} & set(sys.modules)")
    out = tmp_path / "embedded"
    subprocess.run([sys.executable, "-c", program, str(out)], check=True, cwd=REPOSITORY, timeout=200)
    meta = json.loads((out / "meta.json").read_text())
    assert (meta["tokenizer"], meta["vocab_size"], meta["dtype"]) == ("bytes", 257, "uint16")
    assert meta["splits"]["train"]["tokens"] + meta["splits"]["val"]["tokens"] >= 5_000_000
    ids = np.fromfile(out / "val.bin", dtype="<u2")
    text = ids[ids < 256].astype(np.uint8).tobytes().decode()
    letters = sum((c.isalpha() and c.isascii()) or c in " \n" for c in text) / len(text)
    words = text.split()
    assert letters > 0.9
    assert 0.03 < sum(word.lower() == "the" for word in words) / len(words) < 0.12
    assert len(set(words)) > 5000


def test_the_embedded_corpus_is_deterministic_and_repeats_no_paragraph(monkeypatch):
    monkeypatch.setattr(corpus, "ENOUGH", 300_000)
    monkeypatch.setattr(corpus, "PER_PACKAGE", 150_000)
    first = list(corpus.documents())
    assert first == list(corpus.documents())
    paragraphs = [p for _, text in first for p in text[:-1].split("\n\n")]
    assert len(set(paragraphs)) == len(paragraphs) > 300
    assert len({name.split("/")[0] for name, _ in first}) >= 2


@pytest.mark.parametrize("text, prose", [
    ("This function returns the sum of all of the values that have been given to it as an argument.", True),
    ("x = torch.zeros(3); y = model(x); for i in range(10): print(i, y[i])", False),
    ("+-----+------+ | a | the | of | in | to | is | and | that | was | with | +----+", False),
    ("input, output, kernel_size, stride, padding, dilation, groups, bias, device, dtype, layout, out.", False),
    ("Too short to be of use.", False)])
def test_prose_is_told_from_code(text, prose):
    assert corpus.is_prose(text) == prose
