"""What is written is whole: on a disk that fills up halfway what was there stays, and one sentence says so."""

import contextlib
import re
import resource
from pathlib import Path

import pytest

from diagnostics.lines import pyplot, save
from files import write_text

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def full_disk():
    """No file grows past two bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def draw(path, title):
    figure, axis = pyplot().subplots(figsize=(1, 1))
    axis.set_title(title)
    save(figure, path, dpi=50)


@pytest.mark.parametrize("write, name", [(write_text, "table.json"), (draw, "figure.png"), (draw, "figure.svg")])
def test_what_was_there_stays_until_all_that_is_new_is(tmp_path, write, name):
    file, link = tmp_path / "kept" / name, tmp_path / f"link{Path(name).suffix}"
    pyplot().close("all")  # what another test left, such as a figure whose drawing was refused halfway
    write(file, "before")
    before = file.read_bytes()
    link.symlink_to(file)
    with full_disk(), pytest.raises(OSError, match=rf"{file} could not be written \(.*\), and is as it was.*make room"):
        write(link, "now")
    assert file.read_bytes() == before and [path.name for path in file.parent.iterdir()] == [name]
    write(link, "now")
    assert file.read_bytes() != before and link.is_symlink() and not pyplot().get_fignums()


def test_what_is_no_file_stays_what_it_is():
    write_text("/dev/null", "now")
    assert Path("/dev/null").is_char_device()


def test_nothing_else_writes_results():
    """Tables, pages, figures and scenes go through files.py; what is left are new data and logs as they come."""
    writes = re.compile(r"savefig\(|\.write_(?:text|bytes)\(|np\.save\w*\(|open\([^)]*\"[wx]b?\"")
    found = {f"{path.relative_to(ROOT)}: {found}" for folder in ("diagnostics", "scripts")
             for path in (ROOT / folder).glob("*.py") for found in writes.findall(path.read_text())}
    assert found == {"diagnostics/lines.py: savefig(", "diagnostics/scene.py: np.savez_compressed(",  # into memory
                     "scripts/bench_throughput.py: .write_bytes(", "scripts/bench_throughput.py: .write_text(",
                     "scripts/check_determinism.py: open(f\"{out}.log\", \"w\""}
