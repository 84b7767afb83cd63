import subprocess
import sys

import numpy as np
import pytest

from data.writer import write_corpus
from replay.__main__ import main
from replay.authors import import_order
from replay.order import Header, OrderError, OrderFile

RANKS, MICRO_STEPS, BATCH, STEPS = 3, 2, 4, 5
HEADER = Header("numbers", 10_000, "ab" * 32, 16, RANKS * MICRO_STEPS * BATCH)


@pytest.fixture
def drawn():
    """Offsets by step, micro-step, rank, sequence."""
    return np.random.default_rng(0).integers(0, HEADER.starts, (STEPS, MICRO_STEPS, RANKS, BATCH))


def write(folder, drawn, line="step"):
    folder.mkdir(exist_ok=True)
    for rank in range(drawn.shape[2]):
        of_rank = drawn[:, :, rank].reshape((len(drawn), -1) if line == "step" else (-1, drawn.shape[3]))
        text = "".join(",".join(map(str, row)) + "\n" for row in of_rank.tolist())
        (folder / f"generated_indices_rank_{rank}.txt").write_text(text)
    return folder


def read(path):
    with OrderFile(path) as order:
        return np.array([order.row(step) for step in range(order.rows)])


@pytest.mark.parametrize("line, batch_size", [("step", BATCH), ("micro_step", BATCH), ("micro_step", None)])
def test_rows_are_global_in_the_order_micro_step_then_rank(tmp_path, drawn, line, batch_size):
    out = tmp_path / "order.bin"
    assert import_order(write(tmp_path / "text", drawn, line), out, HEADER, batch_size, line) == STEPS
    assert np.array_equal(read(out), drawn.reshape(STEPS, -1))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["order.bin", "text"]


def test_one_rank_needs_no_batch_size(tmp_path, drawn):
    header = Header(**(HEADER.__dict__ | {"sequences_per_step": MICRO_STEPS * BATCH}))
    import_order(write(tmp_path / "text", drawn[:, :, :1]), tmp_path / "o", header)
    assert np.array_equal(read(tmp_path / "o"), drawn[:, :, 0].reshape(STEPS, -1))


def test_random_shapes_come_back(tmp_path):
    rng = np.random.default_rng(1)
    for case in range(20):
        shape = tuple(rng.integers(1, 6, 4))
        header = Header("x", 10_000, "0" * 64, 16, int(np.prod(shape[1:])))
        drawn, line = rng.integers(0, header.starts, shape), ("step", "micro_step")[case % 2]
        import_order(write(tmp_path / f"t{case}", drawn, line), tmp_path / f"o{case}", header, int(shape[3]), line)
        assert np.array_equal(read(tmp_path / f"o{case}"), drawn.reshape(shape[0], -1))


def test_steps_that_a_killed_rank_lacks_are_dropped_with_a_message(tmp_path, drawn, capsys):
    folder = write(tmp_path / "text", drawn)
    path = folder / "generated_indices_rank_1.txt"
    path.write_text(path.read_text()[:-2])
    assert import_order(folder, tmp_path / "o", HEADER, BATCH) == STEPS - 1
    printed = capsys.readouterr().out
    assert f"rank_1.txt, line {STEPS}: dropped" in printed
    assert f"generated_indices_rank_1.txt ends after {STEPS - 1} steps" in printed
    folder = write(tmp_path / "micro", drawn, "micro_step")
    for path in folder.iterdir():  # a batch fetched ahead and never trained on
        path.write_text(path.read_text() + "1,2,3,4\n")
    assert import_order(folder, tmp_path / "p", HEADER, BATCH, "micro_step") == STEPS
    assert "dropped the last 1 of 2 lines" in capsys.readouterr().out
    assert np.array_equal(read(tmp_path / "p"), drawn.reshape(STEPS, -1))


@pytest.mark.parametrize("line, message", [
    ("1,2,x,4,5,6,7,8", "'x' is not a token offset"), ("1,2,3", "3 offsets, but 8 are expected"),
    ("", "line is empty, but 8"), ("1,2,3,4,5,6,7,", "'' is not a token offset"), ("1,2,3,4,5,6,7,8.5", "'8.5' is not"),
    ("1,2,3,4,5,6,7,9984", "offset 9984 is outside 0 to 9983.*10000 tokens have with block_size=16"),
    ("1,2,3,4,5,6,7,-1", "offset -1 is outside"), (f"1,2,3,4,5,6,7,{1 << 80}", f"offset {1 << 80} is outside"),
    ("\x00\ufffd1,2,3,4,5,6,7,8", "is not a token offset")])
def test_a_malformed_line_is_named(tmp_path, drawn, line, message):
    folder = write(tmp_path / "text", drawn)
    path = folder / "generated_indices_rank_2.txt"
    lines = path.read_text().splitlines()
    lines[3] = line
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(OrderError, match=rf"generated_indices_rank_2\.txt, line 4: .*{message}"):
        import_order(folder, tmp_path / "o", HEADER, BATCH)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text"], "nothing half-made stays"


def test_folders_and_numbers_that_do_not_fit_are_named(tmp_path, drawn):
    out, folder = tmp_path / "o", write(tmp_path / "text", drawn)
    odd = Header(**(HEADER.__dict__ | {"sequences_per_step": 25}))
    for header, batch_size, message in ((odd, BATCH, "25 sequences a step do not divide over the 3 ranks"),
                                        (HEADER, 3, "8 sequences a step and rank are no multiple of batch_size=3"),
                                        (HEADER, 0, "batch_size=0"), (HEADER, None, "3 ranks .* need --batch_size"),
                                        (Header("x", 16, "0", 16, 24), BATCH, "block_size=16 is too large")):
        with pytest.raises(OrderError, match=message):
            import_order(folder, out, header, batch_size)
    with pytest.raises(OrderError, match="not 'word'"):
        import_order(folder, out, HEADER, BATCH, "word")
    (folder / "generated_indices_rank_1.txt").unlink()
    with pytest.raises(OrderError, match=r"no generated_indices_rank_1\.txt, though it has rank 2"):
        import_order(folder, out, HEADER, BATCH)
    with pytest.raises(OrderError, match="has no file"):
        import_order(tmp_path, out, HEADER, BATCH)
    with pytest.raises(OrderError, match="not a folder"):
        import_order(tmp_path / "none", out, HEADER, BATCH)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "generated_indices_rank_0.txt").touch()
    with pytest.raises(OrderError, match="no whole step"):
        import_order(empty, out, HEADER, BATCH)
    out.write_text("kept")
    with pytest.raises(OrderError, match="exists already"):
        import_order(write(folder, drawn), out, HEADER, BATCH)
    assert out.read_text() == "kept"


@pytest.fixture
def imported(tmp_path, drawn):
    folder = tmp_path / "numbers"
    folder.mkdir()
    write_corpus(folder, "bytes", 10_000, {"train": [np.arange(10_000)], "val": [np.arange(30)]}, {})
    out = tmp_path / "order.bin"
    assert main(["import", str(write(tmp_path / "text", drawn)), "--out", str(out), "--data", str(folder),
                 "--block_size", "16", "--sequences", "24", "--batch_size", "4"]) == 0
    return out, folder


def test_the_command_imports_shows_and_verifies(imported, drawn, capsys):
    out, folder = imported
    assert np.array_equal(read(out), drawn.reshape(STEPS, -1))
    assert main(["verify", str(out), "--data", str(folder)]) == 0
    assert main(["info", str(out)]) == 0
    printed = capsys.readouterr().out
    with OrderFile(out) as order:
        assert printed.count(order.sha256()) == 2 and order.header.sha256 in printed
    for shown in ("numbers", "10,000", "unknown (imported)", "1,920"):
        assert shown in printed


def test_verify_finds_one_changed_token_and_other_data(imported, tmp_path, capsys):
    out, folder = imported
    data = folder / "train.bin"
    whole = data.read_bytes()
    data.write_bytes(whole[:500] + b"\x07" + whole[501:])
    assert main(["verify", str(out), "--data", str(folder)]) == 2
    assert "says" in capsys.readouterr().err
    (folder / "meta.json").unlink()  # not even without a recorded hash
    assert main(["verify", str(out), "--data", str(folder)]) == 2
    assert "was recorded with sha256=" in capsys.readouterr().err
    data.write_bytes(whole)
    assert main(["verify", str(out), "--data", str(folder)]) == 0
    data.write_bytes(whole[:-2])
    assert main(["verify", str(out), "--data", str(folder)]) == 2
    assert "n_tokens=10000 on 'numbers', but this run has n_tokens=9999" in capsys.readouterr().err


def test_verify_reads_every_row(imported, capsys):
    out, folder = imported
    raw = bytearray(out.read_bytes())
    raw[-8 * 25 * 3] ^= 1
    out.write_bytes(raw)
    for command in (["info", str(out)], ["verify", str(out), "--data", str(folder)]):
        assert main(command) == 2
        assert "row 2 of" in capsys.readouterr().err


def test_user_errors_of_the_program_exit_with_2(tmp_path):
    for arguments in (["info", str(tmp_path / "none")], [], ["verify", str(tmp_path / "none")],
                      ["import", str(tmp_path), "--out", "o", "--data", str(tmp_path), "--block_size", "0",
                       "--sequences", "1"]):
        done = subprocess.run([sys.executable, "-m", "replay", *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and "Traceback" not in done.stderr and "error" in done.stderr
