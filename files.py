"""Tables, pages and figures that are whole: what was there before is there until all of the new one is."""

import contextlib
import os
from pathlib import Path


def write_text(path: str | Path, text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Makes the folder, too. What was there before is there until all of the content is on the disk, which may be full,
    or a process killed, halfway. Errors: OSError, one sentence."""
    path = Path(path).resolve()  # a link stays one
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():  # /dev/stdout
            path.write_bytes(content)
            return
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise OSError(f"{path} could not be written ({error.strerror}), and is as it was before; make room there and "
                      "go on") from error


def sync_folder(folder: Path) -> None:
    """Forces the names in it to disk: without that a power cut may bring the old folder back."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
