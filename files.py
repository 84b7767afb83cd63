"""Tables, pages and figures that are whole: what was there before is there until all of the new one is."""

import os
from pathlib import Path


def write_text(path: str | Path, text: str) -> None:
    """As `write_bytes`, in UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> None:
    """Makes the folder, too. What was there before is there until all of the content is: a disk may be full, or a
    process killed, halfway. Errors: OSError, one sentence."""
    path = Path(path).resolve()  # a link stays one
    temporary = path if path.exists() and not path.is_file() else path.with_name(f"{path.name}.tmp")  # /dev/stdout
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        if temporary != path:
            os.replace(temporary, path)
    except OSError as error:
        if temporary != path:
            temporary.unlink(missing_ok=True)
        raise OSError(f"{path} could not be written ({error.strerror}), and is as it was before; make room there and "
                      "give the command again") from error
