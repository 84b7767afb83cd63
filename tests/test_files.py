"""What is written is whole: on a disk that fills up halfway what was there stays, and one sentence says so."""

import contextlib
import gc
import re
import resource
import weakref
from pathlib import Path

import pytest

from diagnostics.lines import blank, save, subplots
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
    figure, axis = subplots(figsize=(1, 1))
    axis.set_title(title)
    save(figure, path, dpi=50)


@pytest.mark.parametrize("write, name", [(write_text, "table.json"), (draw, "figure.png"), (draw, "figure.svg")])
def test_what_was_there_stays_until_all_that_is_new_is(tmp_path, write, name):
    file, link = tmp_path / "kept" / name, tmp_path / f"link{Path(name).suffix}"
    write(file, "before")
    before = file.read_bytes()
    link.symlink_to(file)
    with full_disk(), pytest.raises(OSError, match=rf"{file} could not be written \(.*\), and is as it was.*make room"):
        write(link, "now")
    assert file.read_bytes() == before and [path.name for path in file.parent.iterdir()] == [name]
    write(link, "now")
    assert file.read_bytes() != before and link.is_symlink()


def test_what_is_no_file_stays_what_it_is():
    write_text("/dev/null", "now")
    assert Path("/dev/null").is_char_device()


def test_a_drawing_that_is_refused_leaves_no_figure(tmp_path):
    figure = blank(figsize=(1, 1))
    kept = weakref.ref(figure)
    with pytest.raises(ValueError, match="txt"):
        save(figure, tmp_path / "figure.txt", dpi=50)
    del figure
    gc.collect()
    assert kept() is None and not list(tmp_path.iterdir())


def test_no_figure_is_pyplots():
    """Which keeps each one until it is closed, and so one whose drawing was refused halfway."""
    assert not [path for folder in ("diagnostics", "scripts") for path in (ROOT / folder).glob("*.py")
                if re.search("import.*pyplot|matplotlib.pyplot", path.read_text())]


def test_nothing_else_writes_results():
    """Tables, pages, figures and scenes go through files.py; what is left are new data and logs as they come."""
    writes = re.compile(r"savefig\(|\.write_(?:text|bytes)\(|np\.save\w*\(|open\([^)]*\"[wx]b?\"")
    found = {f"{path.relative_to(ROOT)}: {found}" for folder in ("diagnostics", "scripts")
             for path in (ROOT / folder).glob("*.py") for found in writes.findall(path.read_text())}
    assert found == {"diagnostics/lines.py: savefig(", "diagnostics/scene.py: np.savez_compressed(",  # into memory
                     "scripts/check_determinism.py: open(f\"{out}.log\", \"w\""}
