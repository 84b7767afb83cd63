import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from data.loader import draw_offsets, open_tokens
from data.meta import DataError
from data.writer import write_corpus


def corpus(folder, train, val=(1, 2, 3), vocab_size=1000):
    folder.mkdir(exist_ok=True)
    write_corpus(folder, "bytes", vocab_size, {"train": [np.asarray(train)], "val": [np.asarray(val)]}, {})
    return folder


@pytest.fixture
def folder(tmp_path):
    return corpus(tmp_path / "numbers", np.arange(1000))


def test_batch_reads_inputs_and_shifted_targets(folder):
    tokens = open_tokens(folder, "train")
    assert (tokens.n_tokens, tokens.vocab_size, tokens.dtype, tokens.name) == (1000, 1000, "uint16", "numbers")
    x, y = tokens.batch(np.array([0, 17, 991]), 8)
    assert x.dtype == y.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous()
    assert x.tolist() == [list(range(s, s + 8)) for s in (0, 17, 991)]
    assert torch.equal(y, x + 1)
    assert tokens.batch(np.empty(0, np.int64), 8)[0].shape == (0, 8)


def test_random_batches_equal_slices_of_the_file_in_both_dtypes(tmp_path):
    rng = np.random.default_rng(0)
    for vocab_size, dtype in ((50257, "uint16"), (65536, "uint16"), (65537, "uint32"), (1 << 20, "uint32")):
        ids = np.append(rng.integers(0, vocab_size, 5000), vocab_size - 1)
        tokens = open_tokens(corpus(tmp_path / str(vocab_size), ids, vocab_size=vocab_size), "train")
        assert tokens.dtype == dtype
        for _ in range(20):
            block = int(rng.integers(1, 300))
            offsets = rng.integers(0, len(ids) - block, 7)
            x, y = tokens.batch(offsets, block)
            for row, start in enumerate(offsets):
                assert x[row].tolist() == ids[start:start + block].tolist()
                assert y[row].tolist() == ids[start + 1:start + block + 1].tolist()


def test_threads_share_one_file(folder):
    tokens = open_tokens(folder, "train")

    def read(seed):
        offsets = draw_offsets(1000, 16, 50, seed, "train", 0)
        return torch.equal(tokens.batch(offsets, 16)[0], torch.from_numpy(offsets)[:, None] + torch.arange(16))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(200)))


def test_block_plus_one_tokens_have_one_start(tmp_path):
    tokens = open_tokens(corpus(tmp_path / "c", range(9)), "train")
    assert draw_offsets(9, 8, 100, 1, "train", 3).tolist() == [0] * 100
    assert tokens.batch(np.array([0]), 8)[1].tolist() == [list(range(1, 9))]
    with pytest.raises(DataError, match=r"token 1 of .* starts 0 to 0"):
        tokens.batch(np.array([1]), 8)
    for block in (9, 10):
        for call in (lambda block=block: draw_offsets(9, block, 1, 1, "train", 0),
                     lambda block=block: tokens.batch(np.array([0]), block)):
            with pytest.raises(DataError, match=f"9 tokens, but .*block_size={block}"):
                call()


def test_offsets_are_uniform_over_all_valid_starts():
    drawn = np.concatenate([draw_offsets(40, 8, 512, 7, "train", step) for step in range(100)])
    counts = np.bincount(drawn, minlength=32)
    assert drawn.dtype == np.int64 and len(counts) == 32
    chi_square = ((counts - 1600.0) ** 2 / 1600.0).sum()
    assert 10 < chi_square < 65  # 31 degrees of freedom: outside with probability 1e-3
    far = draw_offsets(9_035_582_198, 1024, 4096, 7, "train", 0)
    assert far.max() > 8.9e9 and far.min() < 1e8 and abs(far.mean() / 9.0356e9 - 0.5) < 0.02


def test_offsets_depend_on_nothing_but_their_arguments():
    base = draw_offsets(10**9, 64, 64, 1, "train", 5)
    state = np.random.get_state()[1].copy()
    torch_state = torch.get_rng_state()
    draw_offsets(10**9, 64, 1000, 1, "val", 5)
    assert np.array_equal(base, draw_offsets(10**9, 64, 64, 1, "train", 5))
    assert np.array_equal(base[:16], draw_offsets(10**9, 64, 16, 1, "train", 5))
    assert np.array_equal(state, np.random.get_state()[1]) and torch.equal(torch_state, torch.get_rng_state())
    others = [(1, "val", 5), (2, "train", 5), (1, "train", 6), (5, "train", 1)]
    for seed, stream, step in others:
        assert not np.intersect1d(base, draw_offsets(10**9, 64, 64, seed, stream, step)).size


def philox(counter, key):
    """Philox4x64-10 on Python integers (Salmon et al. 2011, figure 6)."""
    (a, b, c, d), (k, l), mask = counter, key, (1 << 64) - 1
    for _ in range(10):
        high, low = divmod(0xD2E7470EE14C6C93 * a, 1 << 64), divmod(0xCA5A826395121157 * c, 1 << 64)
        a, b, c, d = low[0] ^ b ^ k, low[1], high[0] ^ d ^ l, high[1]
        k, l = (k + 0x9E3779B97F4A7C15) & mask, (l + 0xBB67AE8584CAA73B) & mask
    return a, b, c, d


@pytest.mark.parametrize("n_tokens, seed, stream, step", [(18_211_613, 1337, "train", 0), (183_984, 1, "val", 999),
                                                          (9_035_582_198, (1 << 64) - 1, "train", 599_999)])
def test_offsets_are_philox_whatever_numpy_does(n_tokens, seed, stream, step):
    """An independent generator agrees, so no NumPy version can change what a seed reads."""
    key = seed, int.from_bytes(hashlib.sha256(stream.encode()).digest()[:8], "little")
    words = [word for block in (1, 2) for word in philox((block, 0, step, 0), key)]
    assert draw_offsets(n_tokens, 512, 8, seed, stream, step).tolist() == [w % (n_tokens - 512) for w in words]


@pytest.mark.parametrize("seed, step", [(-1, 0), (0, -1), (1 << 64, 0)])
def test_seed_and_step_have_a_range(seed, step):
    with pytest.raises(DataError, match=f"seed={seed} and step={step}"):
        draw_offsets(100, 8, 1, seed, "train", step)


def test_missing_data_names_the_command_that_makes_it(tmp_path, folder):
    with pytest.raises(DataError, match=r"openwebtext does not exist.*python data/openwebtext/prepare\.py"):
        open_tokens(tmp_path / "openwebtext", "train")
    with pytest.raises(DataError, match=r"has no train\.bin.*data/text/prepare\.py DIR --out .*mine"):
        (tmp_path / "mine").mkdir()
        open_tokens(tmp_path / "mine", "train")
    (folder / "val.bin").unlink()
    with pytest.raises(DataError, match=r"has no val\.bin"):
        open_tokens(folder, "val")


def test_a_folder_without_meta_is_read_as_nanogpt_writes_it(tmp_path, capsys):
    ids = np.arange(500, dtype=np.uint16)
    ids.tofile(tmp_path / "train.bin")
    tokens = open_tokens(tmp_path, "train")
    assert "no meta.json" in capsys.readouterr().out
    assert (tokens.dtype, tokens.vocab_size, tokens.tokenizer) == ("uint16", 50257, "gpt2")
    assert tokens.sha256 == hashlib.sha256(ids.tobytes()).hexdigest()
    (tmp_path / "meta.pkl").write_bytes(b"not read")
    assert open_tokens(tmp_path, "train").tokenizer == "unknown"


def test_sizes_that_do_not_fit_are_named(folder):
    path = folder / "train.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"1999 bytes.*2 bytes of a uint16"):
        open_tokens(folder, "train")
    path.write_bytes(whole[:-2])
    with pytest.raises(DataError, match=r"999 tokens, but meta\.json beside it says 1000"):
        open_tokens(folder, "train")


def test_a_file_cut_during_a_run_is_an_error(folder):
    tokens = open_tokens(folder, "train")
    os.truncate(folder / "train.bin", 200)
    with pytest.raises(DataError, match="became shorter"):
        tokens.batch(np.array([500]), 8)


def test_ids_beyond_the_vocabulary_are_an_error(folder):
    with open(folder / "train.bin", "r+b") as file:
        file.seek(20)
        file.write((1000).to_bytes(2, "little"))
    with pytest.raises(DataError, match="token id 1000, but its vocabulary of 1000"):
        open_tokens(folder, "train").batch(np.array([8]), 8)


@pytest.mark.parametrize("text, message", [
    ("{", "not JSON"), ("[]", "wrong type"), ('{"tokenizer": "gpt2"}', "lacks a value"),
    ('{"tokenizer": "x", "vocab_size": 9, "dtype": "int8", "splits": {}}', "dtype='int8'"),
    ('{"tokenizer": "x", "vocab_size": 9, "dtype": "uint16", "splits": {}}', "does not mention the split 'train'")])
def test_a_malformed_meta_is_one_sentence(folder, text, message):
    (folder / "meta.json").write_text(text)
    with pytest.raises(DataError, match=message):
        open_tokens(folder, "train")


def test_verify_finds_one_changed_token(folder):
    tokens = open_tokens(folder, "train")
    assert tokens.verify() == tokens.sha256 == hashlib.sha256((folder / "train.bin").read_bytes()).hexdigest()
    with open(folder / "train.bin", "r+b") as file:
        file.seek(1000)
        file.write((7).to_bytes(2, "little"))
    with pytest.raises(DataError, match=f"train.bin has SHA-256 .* says {tokens.sha256}"):
        tokens.verify()


def test_verify_hashes_again_only_after_a_change(folder, monkeypatch):
    path = folder / "train.bin"
    monkeypatch.setattr("data.loader.RACY_NS", 0)
    tokens = open_tokens(folder, "train")
    digest = tokens.verify()
    assert (folder / ".train.bin.sha256").is_file()
    hashed = []
    monkeypatch.setattr("data.loader.Tokens._hash", lambda self: hashed.append(1) or digest)
    assert tokens.verify() == digest and not hashed
    stat = path.stat()
    with open(path, "r+b") as file:  # the same size, and the same modification time by hand: the change time tells
        file.write((7).to_bytes(2, "little"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    tokens.verify()
    assert hashed
    (folder / ".train.bin.sha256").write_text("damaged")
    tokens.verify()
    assert len(hashed) == 2


def test_a_fresh_file_is_never_trusted_by_its_times(folder):
    open_tokens(folder, "train").verify()
    assert not (folder / ".train.bin.sha256").exists()


def test_memory_is_flat_and_training_imports_neither_tiktoken_nor_datasets(tmp_path):
    folder = tmp_path / "big"
    folder.mkdir()
    np.random.default_rng(0).integers(0, 50257, 40_000_000, dtype=np.uint16).tofile(folder / "train.bin")
    program = """
import resource, sys
from pathlib import Path
from data.loader import draw_offsets, open_tokens
import replay.order
tokens = open_tokens(Path(sys.argv[1]), "train")
def read(steps):
    for step in steps:
        tokens.batch(draw_offsets(tokens.n_tokens, 256, 12, 1, "train", step), 256)
read(range(500))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read(range(10_000))
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096, "more than 4 MB"
assert not {"tiktoken", "datasets"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program, str(folder)], check=True, timeout=60)


def test_the_loader_feeds_far_more_than_a_gpu_takes(tmp_path):
    import time

    np.random.default_rng(0).integers(0, 50257, 4_000_000, dtype=np.uint16).tofile(tmp_path / "train.bin")
    tokens = open_tokens(tmp_path, "train")
    best = 0.0
    for attempt in range(5):
        start = time.perf_counter()
        for step in range(50):
            tokens.batch(draw_offsets(tokens.n_tokens, 1024, 12, attempt, "train", step), 1024)
        best = max(best, 50 * 12 * 1024 / (time.perf_counter() - start))
    assert best > 20e6
