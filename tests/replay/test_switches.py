"""The companion of an order file: what is written comes back, and what else may lie there is named."""

import json
import math
from pathlib import Path

import pytest

from attention import AttentionSpec
from attention.spec import from_key
from replay.order import OrderError
from replay.switches import Switch, companion, from_plain, plain, read_switches, write_switches

SPECS = [AttentionSpec("stabilized"), AttentionSpec("flash_bf16", stabilizer="paper", shift_cap=math.inf),
         AttentionSpec("flash_bf16", output_heads=(0, 3)), AttentionSpec("standard")]


def test_companion():
    assert companion("runs/a/order.bin") == Path("runs/a/order.switches.json")


def test_round_trip(tmp_path):
    """Every spec, infinities and tuples included, in order of step; the file is strict JSON."""
    path = tmp_path / "order.switches.json"
    switches = [Switch(10 * i, i % 2, spec.key) for i, spec in enumerate(SPECS)]
    write_switches(path, switches)
    assert read_switches(path) == switches and [from_key(s.spec) for s in read_switches(path)] == SPECS
    table = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert table["version"] == 1 and table["switches"][1]["spec"]["shift_cap"] == "Infinity"
    assert from_plain(plain(switches[::-1]), "here") == switches
    assert list(tmp_path.iterdir()) == [path]
    write_switches(path, [])
    assert read_switches(path) == []


@pytest.mark.parametrize("text, message", [
    ("", "is no valid JSON"), ("[]", "is not of version 1"), ('{"version": 2, "switches": []}', "is not of version 1"),
    ('{"version": 1}', "holds no list of switches"), ('{"version": 1, "switches": [3]}', "holds no list of switches"),
    ('{"version": 1, "switches": [{"step": 1.5, "layer": 0, "spec": {}}]}', "holds no list of switches"),
    ('{"version": 1, "switches": [{"step": 1, "layer": -1, "spec": {}}]}', "holds no list of switches"),
    ('{"version": 1, "switches": [{"step": 1, "layer": 0, "spec": "standard"}]}', "holds no list of switches")])
def test_damaged(tmp_path, text, message):
    path = tmp_path / "order.switches.json"
    path.write_text(text)
    with pytest.raises(OrderError, match=message) as error:
        read_switches(path)
    assert str(path) in str(error.value) and "replay_switches=False" in str(error.value)


def test_absent(tmp_path):
    with pytest.raises(OrderError, match=r"cannot be read .No such file.*a run that never switched a layer has none"):
        read_switches(tmp_path / "order.switches.json")


def test_no_room(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OrderError, match="could not be written"):
        write_switches(tmp_path / "file/order.switches.json", [])
