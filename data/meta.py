"""meta.json: what a corpus is. Needs NumPy alone, so that preparing a corpus never loads torch.

A corpus is a folder: train.bin and val.bin, flat little-endian token ids, and meta.json, which says what they are:

    {"tokenizer": "gpt2", "vocab_size": 50257, "dtype": "uint16", "source": {...},
     "splits": {"train": {"tokens": 123, "sha256": "..."}, "val": {"tokens": 45, "sha256": "..."}}}
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
GPT2_VOCAB = 50257
REPOSITORY = Path(__file__).resolve().parents[1]
UNFINISHED = "meta.json.new"  # there while the token files are renamed into place


class DataError(ValueError):
    """A corpus that cannot be read or is not the one asked for: one sentence with the values and the way out."""


def corpus_folder(name: str | Path) -> Path:
    """A bare name is a folder under the repository's data/, whatever the working folder; anything else is a path, and
    an empty one a DataError."""
    if not str(name).strip():
        raise DataError("the name of the data folder is empty; the working folder is .")
    return REPOSITORY / "data" / name if len(Path(name).parts) == 1 and str(name) not in (".", "..") else Path(name)


@dataclass(frozen=True)
class Meta:
    """meta.json: the tokenizer's name, ids are below `vocab_size`, `tokens` and `sha256` by split."""

    tokenizer: str
    vocab_size: int
    dtype: str
    tokens: dict[str, int]
    sha256: dict[str, str]
    source: dict = field(default_factory=dict)

    def to_json(self) -> str:
        splits = {split: {"tokens": n, "sha256": self.sha256[split]} for split, n in self.tokens.items()}
        return json.dumps({"tokenizer": self.tokenizer, "vocab_size": self.vocab_size, "dtype": self.dtype,
                           "splits": splits, "source": self.source}, indent=2) + "\n"


def read_meta(folder: Path) -> Meta | None:
    """The folder's meta.json, or None where there is none. DataError where it is malformed."""
    path = Path(folder) / "meta.json"
    if path.with_name(UNFINISHED).exists():
        raise DataError(f"{folder} was being replaced when its preparation was killed ({UNFINISHED} is left); "
                        "prepare it again")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{path} is not JSON ({error}); prepare the corpus again") from None
    try:
        splits = raw["splits"]
        meta = Meta(str(raw["tokenizer"]), int(raw["vocab_size"]), str(raw["dtype"]),
                    {s: int(v["tokens"]) for s, v in splits.items()}, {s: str(v["sha256"]) for s, v in splits.items()},
                    dict(raw.get("source", {})))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{path} lacks a value or has one of the wrong type ({error!r}); prepare it again") from None
    if meta.dtype not in DTYPES:
        raise DataError(f"{path} says dtype={meta.dtype!r}, but only {', '.join(DTYPES)} can be read")
    return meta


def prepare_command(folder: Path) -> str:
    """The command that makes a missing corpus of this name."""
    if Path(folder).name == "openwebtext":
        return "python data/openwebtext/prepare.py (configs/cpu_flash_bf16.toml needs no such download)"
    if Path(folder).name == "embedded":
        return f"python data/text/prepare.py --out {folder}"
    return (f"python data/text/prepare.py DIR --out {folder} with DIR a folder of text, and --tokenizer gpt2-8192 for "
            "configs/mini_*.toml")
