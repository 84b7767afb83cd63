import base64
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data.loader import open_tokens
from data.meta import DataError, read_meta

SCRIPT = Path(__file__).parents[2] / "data" / "openwebtext" / "prepare.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Local parquet folders with 1, 10 and 30000 documents, a rank file, and a Hugging Face cache of their own."""
    import datasets

    root = tmp_path_factory.mktemp("hub")
    tokens = [bytes([b]) for b in range(256)] + [b"th", b"the", b" d", b"oc"]
    (root / "ranks").write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens)))
    for count in (1, 10, 30_000):
        folder = root / f"docs{count}"
        folder.mkdir()
        rows = [f"the document {i} " * (1 + i % 7) for i in range(count)]
        datasets.Dataset.from_dict({"text": rows, "url": rows}).to_parquet(folder / "train-00000.parquet")
    datasets.Dataset.from_dict({"text": ["a b", "c d"]}).save_to_disk(root / "saved")
    (root / "other").mkdir()
    datasets.Dataset.from_dict({"body": ["a", "b"]}).to_parquet(root / "other" / "train.parquet")
    return root


def run(made, out, *arguments, wait=True):
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--gpt2_ranks", str(made / "ranks")]
    command += map(str, arguments)
    environment = os.environ | {"HF_HOME": str(made / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if not wait:
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def documents(made, out, split):
    """The split's documents, decoded: every one ends with the end-of-text id."""
    from data.tokenizer import tokenizer

    encoder = tokenizer("gpt2", made / "ranks")
    ids = np.fromfile(out / f"{split}.bin", dtype="<u2")
    assert ids[-1] == encoder.end_of_text
    return [encoder.decode(part[part != encoder.end_of_text].tolist())
            for part in np.split(ids, np.flatnonzero(ids == encoder.end_of_text) + 1)[:-1]]


def test_ten_documents_are_split_and_ordered_as_nanogpt_does(made, tmp_path):
    import datasets

    done = run(made, tmp_path / "out", "--id", made / "docs10", "--workers", 2)
    assert done.returncode == 0, done.stderr
    parts = datasets.Dataset.from_parquet(str(made / "docs10" / "train-00000.parquet"), cache_dir=tmp_path / "cache")
    parts = parts.train_test_split(test_size=0.0005, seed=2357, shuffle=True)
    assert documents(made, tmp_path / "out", "train") == parts["train"]["text"][:]
    assert documents(made, tmp_path / "out", "val") == parts["test"]["text"][:]
    meta = read_meta(tmp_path / "out")
    assert (meta.tokenizer, meta.vocab_size, meta.dtype) == ("gpt2", 261, "uint16") and meta.source["documents"] == 10
    assert open_tokens(tmp_path / "out", "train").verify() == meta.sha256["train"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["meta.json", "train.bin", "val.bin"]


def test_one_document_and_a_saved_data_set_and_a_subset(made, tmp_path):
    for name, arguments, count in (("docs1", (), 1), ("saved", (), 2), ("docs10", ("--documents", 3), 3)):
        done = run(made, tmp_path / name, "--id", made / name, "--workers", 1, *arguments)
        assert done.returncode == 0, done.stderr
        meta = read_meta(tmp_path / name)
        assert meta.source["documents"] == count and min(meta.tokens.values()) >= 1


def test_a_subset_of_a_hub_data_set_is_streamed(made, tmp_path, monkeypatch):
    import datasets

    from data.openwebtext import prepare as owt

    real, asked = datasets.load_dataset, []

    def local(dataset, **options):
        asked.append((dataset, options))
        return real(str(made / "docs10"), **(options | {"revision": None}))

    monkeypatch.setattr(datasets, "load_dataset", local)
    meta = owt.prepare(tmp_path / "out", "someone/texts", "v2", 4, made / "ranks", 1)
    assert asked == [("someone/texts", {"revision": "v2", "split": "train", "streaming": True})]
    assert meta.source["documents"] == 4 and meta.source["id"] == "someone/texts"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["meta.json", "train.bin", "val.bin"]
    found = documents(made, tmp_path / "out", "train") + documents(made, tmp_path / "out", "val")
    assert sorted(found) == [f"the document {i} " * (1 + i % 7) for i in range(4)]


def test_a_kill_leaves_finished_shards_and_no_worker_and_the_same_command_goes_on(made, tmp_path):
    plain = run(made, tmp_path / "plain", "--id", made / "docs30000", "--workers", 2)
    assert plain.returncode == 0, plain.stderr
    out = tmp_path / "killed"
    child = run(made, out, "--id", made / "docs30000", "--workers", 1, wait=False)
    deadline = time.time() + 60
    while not list(out.glob("shards/train-*.bin")) and child.poll() is None and time.time() < deadline:
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    finished = {p: p.stat().st_mtime_ns for p in out.glob("shards/*.bin")}
    assert finished and not (out / "meta.json").exists(), "the kill came while shards were made"
    time.sleep(1.0)
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(out).encode() in _read(p)], "no worker stays"
    kept = {p: p.stat().st_mtime_ns for p in out.glob("shards/*.bin")}
    again = run(made, out, "--id", made / "docs30000", "--workers", 2)
    assert again.returncode == 0, again.stderr
    assert f"{len(kept)} of 5 shards are finished already" in again.stdout
    assert read_meta(out).sha256 == read_meta(tmp_path / "plain").sha256
    assert sum(len(documents(made, out, split)) for split in ("train", "val")) == 30_000


def _read(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_shards_of_another_task_are_not_used(made, tmp_path):
    from data.openwebtext.prepare import _claim

    _claim(tmp_path / "shards", {"id": "a"})
    (tmp_path / "shards" / "train-00000000.bin").touch()
    _claim(tmp_path / "shards", {"id": "a"})
    assert (tmp_path / "shards" / "train-00000000.bin").exists()
    _claim(tmp_path / "shards", {"id": "b"})
    assert not (tmp_path / "shards" / "train-00000000.bin").exists()


def test_a_dead_worker_is_a_sentence_not_a_hang(made, tmp_path, monkeypatch):
    from data.openwebtext import prepare as owt

    parent, real = os.getpid(), owt._shard_path

    def dies(*arguments):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    monkeypatch.setattr(owt, "_shard_path", dies)
    with pytest.raises(DataError, match=r"a worker process died.*--workers=2"):
        owt.prepare(tmp_path / "out", str(made / "docs10"), None, None, made / "ranks", 2)


def test_the_full_set_must_have_its_known_counts(made, tmp_path, monkeypatch):
    from data.openwebtext import prepare as owt

    real = owt.load
    monkeypatch.setattr(owt, "load", lambda dataset, *rest: real(str(made / "docs10"), *rest))
    with pytest.raises(DataError, match="has 10 documents now, not the known 8013769"):
        owt.prepare(tmp_path / "out", gpt2_ranks=made / "ranks")
    monkeypatch.setattr(owt, "DOCUMENTS", 10)
    with pytest.raises(DataError, match=r"'train': 9035582198, 'val': 4434897"):
        owt.prepare(tmp_path / "out", gpt2_ranks=made / "ranks")
    assert not (tmp_path / "out" / "meta.json").exists()
    counts = owt.prepare(tmp_path / "out", revision="main", gpt2_ranks=made / "ranks").tokens
    monkeypatch.setattr(owt, "EXPECTED", counts)
    assert owt.prepare(tmp_path / "full", gpt2_ranks=made / "ranks").tokens == counts


def test_user_errors_are_sentences(made, tmp_path):
    for arguments, message in ((("--id", made / "other"), "columns body, but none named text"),
                               (("--id", "nobody/nothing", "--revision", "v9"), "HF_HUB_OFFLINE=1"),
                               (("--id", made / "docs10", "--documents", 0), "--documents=0")):
        done = run(made, tmp_path / "out", *arguments)
        assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
