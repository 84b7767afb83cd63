"""What --help of a script that takes train.py's flags too says: its own flags, and where the others are."""

import functools
import importlib
import re
from pathlib import Path

import pytest

from config import ConfigError

SCRIPTS = Path(__file__).parents[2] / "scripts"
MORE = r"parse_known_args|from scripts.rates import"
TAKES_MORE = sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem != "rates"
                    and re.search(MORE, path.read_text()))


def test_which_they_are():
    assert {"bench_train", "bench_throughput", "isolate", "cures", "grid", "reproduce_mini"} <= set(TAKES_MORE)


def main_of(name):
    """The script's main, as a function of its command line alone; and the experiment that it makes, if any."""
    module = importlib.import_module(f"scripts.{name}")
    experiment = {"isolate": "isolation", "cures": "cures"}.get(name)
    argv = (module.__doc__, module.ARMS, f"runs/{experiment}", f"{experiment}.json") if experiment else ()
    return functools.partial(module.main, *argv), experiment


@pytest.mark.parametrize("name", TAKES_MORE)
@pytest.mark.parametrize("flag", ["--dropout=0", "--steps=1"])
def test_a_flag_that_is_given_twice(name, flag, capsys):
    """One that it passes on, or its own: of two one would be lost."""
    said = ""
    try:
        assert main_of(name)[0](["configs/cpu_standard.toml", flag, flag]) == 2
    except (SystemExit, ConfigError) as error:
        said = str(error)
    assert f"is given more than once, {flag} and {flag}; give it once" in capsys.readouterr().err + said


@pytest.mark.parametrize("name", TAKES_MORE)
def test_own_flags_and_where_the_others_are(name, capsys):
    main, experiment = main_of(name)
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    said = capsys.readouterr().out
    source = SCRIPTS / f"{'rates' if experiment else name}.py"
    own = set(re.findall(r'add_argument\("(--\w+)"', source.read_text()))
    assert stop.value.code == 0 and len(own) >= 2 and not [flag for flag in own if f"  {flag}" not in said]
    assert "python train.py --help" in " ".join(said.split())
