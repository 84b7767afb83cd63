"""What --help of a script that takes train.py's flags too says: its own flags, and where the others are."""

import importlib
import re
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
MORE = r"parse_known_args|from scripts.rates import"
TAKES_MORE = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "rates"
                    and re.search(MORE, path.read_text()))


def test_which_they_are():
    assert {"bench_train", "bench_throughput", "isolate", "cures", "grid", "reproduce_mini"} <= set(TAKES_MORE)


@pytest.mark.parametrize("name", TAKES_MORE)
def test_own_flags_and_where_the_others_are(name, capsys):
    module = importlib.import_module(f"scripts.{name}")
    experiment = {"isolate": "isolation", "cures": "cures"}.get(name)
    argv = (module.__doc__, module.ARMS, f"runs/{experiment}", f"{experiment}.json") if experiment else ()
    with pytest.raises(SystemExit) as stop:
        module.main(*argv, ["--help"])
    said = capsys.readouterr().out
    source = SCRIPTS / f"{'rates' if experiment else name}.py"
    own = set(re.findall(r'add_argument\("(--\w+)"', source.read_text()))
    assert stop.value.code == 0 and len(own) >= 2 and not [flag for flag in own if f"  {flag}" not in said]
    assert "python train.py --help" in " ".join(said.split())
