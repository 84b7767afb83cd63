import random
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from replay.order import Header, OrderError, OrderFile, Recorder, order_hash

HEADER = Header("numbers", 10_000, "ab" * 32, 16, 6, 1337)


def rows(count, seed=0):
    return np.random.default_rng(seed).integers(0, HEADER.starts, (count, HEADER.sequences_per_step))


def record(path, table, header=HEADER):
    with Recorder(path, header) as recorder:
        for step, row in enumerate(table):
            recorder.append(step, row)
        recorder.sync()
    return path


@pytest.fixture
def path(tmp_path):
    return record(tmp_path / "order.bin", rows(5))


def test_what_is_recorded_is_read(path):
    with OrderFile(path) as order:
        assert order.header == HEADER and order.rows == 5
        for step, row in enumerate(rows(5)):
            assert order.row(step).dtype == np.int64 and np.array_equal(order.row(step), row)


def test_offsets_past_uint32_and_the_largest_start_survive(tmp_path):
    header = Header("openwebtext", 9_035_582_198, "0" * 64, 1024, 3, None)
    table = [[0, header.starts - 1, 5_000_000_000]]
    with OrderFile(record(tmp_path / "o", table, header)) as order:
        assert order.row(0).tolist() == table[0] and order.header.seed is None


def test_random_headers_round_trip(tmp_path):
    draw = random.Random(3)
    for case in range(40):
        header = Header("n\u00e4me" * draw.randint(0, 400), draw.randint(200, 1 << 60), "f" * 64, draw.randint(1, 100),
                        draw.randint(1, 2000), draw.choice([None, draw.getrandbits(64)]))
        table = np.random.default_rng(case).integers(0, header.starts, (3, header.sequences_per_step))
        with OrderFile(record(tmp_path / str(case), table, header)) as order:
            assert order.header == header
            assert np.array_equal([order.row(step) for step in range(3)], table)


def test_a_resumed_run_repeats_recorded_steps_and_goes_on(path):
    table = rows(8)
    with Recorder(path, HEADER) as recorder:
        assert recorder.rows == 5
        for step in range(3, 8):
            recorder.append(step, table[step])
    with OrderFile(path) as order:
        assert np.array_equal([order.row(step) for step in range(8)], table)


def test_other_offsets_for_a_recorded_step_and_gaps_are_errors(path):
    other = rows(5)[2].copy()
    other[4] += 1
    with Recorder(path, HEADER) as recorder:
        with pytest.raises(OrderError, match=rf"step 2 reads offset {other[4]} at place 4, .*{other[4] - 1}"):
            recorder.append(2, other)
        with pytest.raises(OrderError, match=r"step 6 cannot be recorded.* has 5 steps"):
            recorder.append(6, other)
        for bad in (-1, HEADER.starts):
            other[0] = bad
            with pytest.raises(OrderError, match=rf"offset {bad}, but 10000 tokens and block_size=16 allow 0 to 9983"):
                recorder.append(5, other)
        with pytest.raises(OrderError, match=r"shape \(5,\).* 6 sequences"):
            recorder.append(5, other[:5])
        assert recorder.rows == 5


def test_past_the_end_is_an_error(path):
    with OrderFile(path) as order:
        for step in (5, 99, -1):
            with pytest.raises(OrderError, match=rf"step {step} is past the end of .* 5 steps"):
                order.row(step)


@pytest.mark.parametrize("field, value", [("n_tokens", 10_001), ("sha256", "cd" * 32), ("block_size", 32),
                                          ("sequences_per_step", 12)])
def test_check_names_both_values(path, field, value):
    other = Header(**(HEADER.__dict__ | {field: value}))
    with OrderFile(path) as order, pytest.raises(OrderError) as error:
        order.check(other)
    assert f"{field}={getattr(HEADER, field)}" in str(error.value) and f"{field}={value}" in str(error.value)
    with pytest.raises(OrderError, match=rf"order of another run .{field}"):
        Recorder(path, other)


def test_replay_allows_another_seed_but_recording_does_not(path):
    other = Header(**(HEADER.__dict__ | {"seed": 1, "dataset": "moved"}))
    with OrderFile(path) as order:
        order.check(other)
    with pytest.raises(OrderError, match=r"seed 1337 against 1"):
        Recorder(path, other)
    Recorder(path, Header(**(HEADER.__dict__ | {"dataset": "moved"}))).close()


def test_truncation_at_every_byte_of_the_last_row(path, tmp_path, capsys):
    whole = path.read_bytes()
    cut = tmp_path / "cut.bin"
    for size in range(len(whole) - HEADER.row_bytes, len(whole)):
        cut.write_bytes(whole[:size])
        with OrderFile(cut) as order:
            assert order.rows == 4 and np.array_equal(order.row(3), rows(5)[3])
        assert ("dropped 1 torn row at the end; 4 rows stay" in capsys.readouterr().out) == (
            size > len(whole) - HEADER.row_bytes)
        assert cut.stat().st_size == size, "reading must not write"
        with Recorder(cut, HEADER) as recorder:
            assert recorder.rows == 4 and cut.stat().st_size == len(whole) - HEADER.row_bytes
            recorder.append(4, rows(5)[4])
        assert cut.read_bytes() == whole


def test_truncation_anywhere_in_the_header(path, tmp_path):
    whole = path.read_bytes()
    first = len(whole) - 5 * HEADER.row_bytes
    cut = tmp_path / "cut.bin"
    for size in [*range(1, 40), *range(40, first, 37)]:
        cut.write_bytes(whole[:size])
        with pytest.raises(OrderError, match=r"not an order file|ends inside its header"):
            OrderFile(cut)
        record(cut, rows(5))  # a run that was killed while it made the file starts over
        assert cut.read_bytes() == whole


def test_any_flipped_byte_of_the_header_is_an_error(path, tmp_path):
    whole = path.read_bytes()
    first = len(whole) - 5 * HEADER.row_bytes
    flipped = tmp_path / "flipped.bin"
    draw = random.Random(0)
    for position in range(first):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << draw.randrange(8)
        flipped.write_bytes(damaged)
        with pytest.raises(OrderError, match=r"not an order file|damaged|ends inside"):
            OrderFile(flipped)
        with pytest.raises(OrderError):
            Recorder(flipped, HEADER)
        assert flipped.read_bytes() == damaged


def test_any_flipped_byte_of_a_row_is_an_error(path, tmp_path, capsys):
    whole = path.read_bytes()
    first = len(whole) - 5 * HEADER.row_bytes
    flipped = tmp_path / "flipped.bin"
    draw = random.Random(1)
    for position in range(first, len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << draw.randrange(8)
        flipped.write_bytes(damaged)
        step = (position - first) // HEADER.row_bytes
        with OrderFile(flipped) as order:
            assert order.rows == (4 if step == 4 else 5)
            with pytest.raises(OrderError, match=rf"row {step} .*damaged|step 4 is past the end"):
                order.row(step)


def test_rows_of_zeros_from_a_power_cut_and_swapped_rows_are_found(path, capsys):
    whole = path.read_bytes()
    size = HEADER.row_bytes
    path.write_bytes(whole[:-2 * size] + bytes(2 * size + 5))
    with OrderFile(path) as order:
        assert order.rows == 3
    assert "dropped 3 torn rows" in capsys.readouterr().out
    path.write_bytes(whole[:-5 * size] + whole[-4 * size:-3 * size] + whole[-5 * size:-4 * size] + whole[-3 * size:])
    with OrderFile(path) as order, pytest.raises(OrderError, match=r"row 0 .*damaged"):
        order.row(0)


def test_absurd_offsets_with_a_right_checksum_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Recorder, "_in_range", lambda self, step, offsets: None)
    table = rows(2)
    table[1, 3] = 1 << 62
    path = record(tmp_path / "o", table)
    monkeypatch.undo()
    with OrderFile(path) as order, pytest.raises(OrderError, match=rf"row 1 .* offset {1 << 62}, but 10000 tokens"):
        order.row(1)


def test_other_files_and_versions_are_named(tmp_path):
    with pytest.raises(OrderError, match=r"cannot be read: No such file"):
        OrderFile(tmp_path / "nothing")
    (tmp_path / "text").write_text("1,2,3\n")
    with pytest.raises(OrderError, match=r"not an order file.*replay import"):
        OrderFile(tmp_path / "text")
    with pytest.raises(OrderError, match=r"not an order file"):
        Recorder(tmp_path / "text", HEADER)
    assert (tmp_path / "text").read_text() == "1,2,3\n"
    (tmp_path / "new").write_bytes(Header(**(HEADER.__dict__ | {"version": 2})).encode())
    with pytest.raises(OrderError, match=r"format version 2, but this program reads version 1"):
        OrderFile(tmp_path / "new")


def test_the_digest_is_of_the_order_alone(path, tmp_path):
    with OrderFile(path) as order:
        digest, prefix = order.sha256(), order.sha256(3)
        with pytest.raises(OrderError, match=r"past the end"):
            order.sha256(6)
        assert order.sha256() == digest  # of the rows alone, not of those that it met on the way to the error
    renamed = record(tmp_path / "a", rows(3), Header(**(HEADER.__dict__ | {"seed": None, "dataset": "x"})))
    running = order_hash(HEADER)
    for row in rows(5):
        running.update(row.astype("<i8").tobytes())
    assert running.hexdigest() == digest != prefix == OrderFile(renamed).sha256()
    with Recorder(path, HEADER) as recorder:
        assert recorder.sha256() == digest


@pytest.mark.parametrize("field, value", [("sha256", "cd" * 32), ("block_size", 32), ("sequences_per_step", 3)])
def test_the_same_offsets_of_other_sequences_have_another_digest(path, tmp_path, field, value):
    header = Header(**(HEADER.__dict__ | {field: value}))
    table = rows(5).reshape(-1, header.sequences_per_step)
    assert OrderFile(record(tmp_path / "other", table, header)).sha256() != OrderFile(path).sha256()


def test_two_runs_cannot_record_to_one_file(path):
    with Recorder(path, HEADER):
        with pytest.raises(OrderError, match=r"another process is recording"):
            Recorder(path, HEADER)
        assert OrderFile(path).rows == 5
    Recorder(path, HEADER).close()


def test_a_reader_sees_only_whole_rows_of_a_recording_run(path):
    with Recorder(path, HEADER) as recorder:
        recorder.append(5, rows(6)[5])
        assert np.array_equal(OrderFile(path).row(5), rows(6)[5])


def test_a_disk_that_fills_up_within_a_row_loses_nothing_but_that_row(path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Recorder(path, HEADER) as recorder:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        try:
            with pytest.raises(OrderError, match=r"row 5 of .* could not be written .File too large.; free space"):
                recorder.append(5, rows(6)[5])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert recorder.rows == 5 and np.array_equal(recorder.row(4), rows(6)[4])
    with OrderFile(path) as order:
        assert order.rows == 5
    with Recorder(path, HEADER) as recorder:
        recorder.append(5, rows(6)[5])
    with OrderFile(path) as order:
        assert np.array_equal(order.row(5), rows(6)[5])


CHILD = """
import sys
import numpy as np
from replay.order import Header, Recorder
recorder = Recorder(sys.argv[1], Header("numbers", 10_000, "ab" * 32, 16, 6, 1337))
print(recorder.rows, flush=True)
step = recorder.rows
while True:
    recorder.append(step, (np.arange(6) * 7 + step) % 9984)
    step += 1
"""


def test_sigkill_at_random_moments_leaves_whole_rows(tmp_path):
    path, draw, before = tmp_path / "order.bin", random.Random(5), 0
    for _ in range(12):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True)
        started = int(child.stdout.readline().split()[-1])
        assert started >= before
        time.sleep(draw.random() * 0.05)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        with OrderFile(path) as order:
            before = order.rows
            for step in range(before):
                assert np.array_equal(order.row(step), (np.arange(6) * 7 + step) % 9984)
    assert before > 100


def test_a_row_costs_microseconds(tmp_path):
    header = Header("x", 10**9, "0" * 64, 1024, 512, 1)
    table = np.random.default_rng(0).integers(0, header.starts, (400, 512))
    best_write = best_read = 1.0
    with Recorder(tmp_path / "o", header) as recorder:
        for part in np.split(np.arange(400), 8):
            start = time.perf_counter()
            for step in part:
                recorder.append(int(step), table[step])
            best_write = min(best_write, (time.perf_counter() - start) / len(part))
    with OrderFile(tmp_path / "o") as order:
        for part in np.split(np.arange(400), 8):
            start = time.perf_counter()
            for step in part:
                order.row(int(step))
            best_read = min(best_read, (time.perf_counter() - start) / len(part))
    assert best_write < 100e-6 and best_read < 100e-6  # 0.1 % of a step of 100 ms


def test_a_growing_order_is_hashed_once(tmp_path, monkeypatch):
    """The digest after each checkpoint is that of a fresh reading, and no row is read twice for it."""
    path, read, row = tmp_path / "o", [], Recorder.row
    monkeypatch.setattr(Recorder, "row", lambda self, step: read.append(step) or row(self, step))
    with Recorder(path, HEADER) as recorder:
        for step, offsets in enumerate(rows(9)):
            recorder.append(step, offsets)
            if step % 4 == 0:
                assert recorder.sha256() == OrderFile(path).sha256()
        assert read == list(range(9))
        assert recorder.sha256(3) == OrderFile(path).sha256(3) and recorder.sha256() == OrderFile(path).sha256()
