import base64
import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data.meta import DataError
from data.tokenizer import GPT2_FILES, Bytes, pieces, tokenizer


def ranks_file(path, merges=(b"th", b"he", b"the", b" t", b" the", b"  ", b"   ", b"\n ")):
    tokens = [bytes([b]) for b in range(256)] + list(merges)
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % rank for rank, t in enumerate(tokens)))
    return path


TEXTS = ["the thin man, in the end: don't we'll 12 345", " ", "a", "<|endoftext|>",
         "na\u00efve \u4e2d\u6587 \U0001f600\n\n  two  spaces\t \n"]


def test_bytes_round_trip():
    encoder = tokenizer("bytes")
    assert (encoder.name, encoder.vocab_size, encoder.end_of_text) == ("bytes", 257, 256)
    for text in TEXTS:
        ids = encoder.encode(text)
        assert ids.tolist() == list(text.encode()) and encoder.decode([*ids.tolist(), 256]) == text


def test_gpt2_from_a_rank_file_merges_and_round_trips(tmp_path, capsys):
    encoder = tokenizer("gpt2", ranks_file(tmp_path / "ranks"))
    assert "264 ranks, not GPT-2's 50256" in capsys.readouterr().out
    assert (encoder.name, encoder.vocab_size, encoder.end_of_text) == ("gpt2", 265, 264)
    assert encoder.encode("the the").tolist() == [258, 260]
    assert 264 not in encoder.encode("<|endoftext|>"), "a text cannot forge the end of a document"
    assert encoder.encode("").shape == (0,)
    for text in TEXTS:
        assert encoder.decode([*encoder.encode(text).tolist(), 264]) == text


def test_the_first_merges_alone_are_an_encoding(tmp_path):
    """gpt2-260 of 264 ranks: bytes, "th", "he" and "the"; " t" and what follows from it are not known."""
    encoder = tokenizer("gpt2-260", ranks_file(tmp_path / "ranks"))
    assert (encoder.name, encoder.vocab_size, encoder.end_of_text) == ("gpt2-260", 260, 259)
    assert encoder.encode("the the").tolist() == [258, 32, 258]
    for text in TEXTS:
        assert encoder.decode([*encoder.encode(text).tolist(), 259]) == text
    for name in ("gpt2-256", "gpt2-266"):
        with pytest.raises(DataError, match=f"{name} is outside gpt2-257 .* to gpt2-265"):
            tokenizer(name, tmp_path / "ranks")
    assert tokenizer("gpt2-265", tmp_path / "ranks").encode("the the").tolist() == [258, 260]


def test_a_text_in_pieces_encodes_as_the_whole(tmp_path):
    encoder = tokenizer("gpt2", ranks_file(tmp_path / "ranks"))
    draw = random.Random(0)
    alphabet = [" ", " ", "  ", "\n", "\t", "\u00a0", "a", "the", "'", "'ll", "12", ".", "!?", "\u4e2d", "\U0001f600"]
    for _ in range(300):
        text = "".join(draw.choices(alphabet, k=draw.randint(0, 120)))
        parts = list(pieces(text, draw.randint(1, 20)))
        assert "".join(parts) == text
        ids = [i for part in parts for i in encoder.encode(part).tolist()]
        assert ids == encoder.encode(text).tolist()


@pytest.mark.parametrize("line, message", [(b"IQ==", "line 3"), (b"!! 2", "line 3"), (b"IQ== x", "line 3"),
                                           (b"AA== 2", "lack 1 of the 256")])
def test_a_malformed_rank_file_is_named(tmp_path, line, message):
    path = ranks_file(tmp_path / "ranks")
    lines = path.read_bytes().splitlines()
    lines[2] = line
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(DataError, match=message):
        tokenizer("gpt2", path)


def test_unknown_names_and_missing_files(tmp_path):
    with pytest.raises(DataError, match="'word' is unknown"):
        tokenizer("word")
    with pytest.raises(DataError, match="none cannot be read"):
        tokenizer("gpt2", tmp_path / "none")
    with pytest.raises(DataError, match="needs --tokenizer gpt2"):
        tokenizer("bytes", tmp_path / "none")


def test_offline_gives_instructions(tmp_path):
    """No network: a proxy that refuses, and an empty cache."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "a.txt").write_text("some text")
    environment = {k: v for k, v in os.environ.items() if "proxy" not in k.lower()}
    environment |= {"TIKTOKEN_CACHE_DIR": str(tmp_path / "cache"), "HTTPS_PROXY": "http://127.0.0.1:9"}
    script = Path(__file__).parents[2] / "data" / "text" / "prepare.py"
    command = [sys.executable, str(script), str(source), "--out", str(tmp_path / "out"), "--tokenizer", "gpt2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    cached_as = [hashlib.sha1(url.encode()).hexdigest() for url in GPT2_FILES]
    for word in ("TIKTOKEN_CACHE_DIR", "--gpt2_ranks", *GPT2_FILES, *cached_as):
        assert word in done.stderr
    assert not (tmp_path / "out" / "train.bin").exists()


def test_bytes_encode_as_unsigned():
    assert Bytes().encode("\u00ff").dtype == np.uint32
