"""The config: every file loads, pairs differ in their attention alone, every mistake names the nearest right thing."""

import dataclasses
import re
import tomllib
import typing
from pathlib import Path

import pytest

from attention import BACKENDS, specs_of
from attention.spec import SWITCHES
from config import (
    HINTS,
    Backend,
    Config,
    ConfigError,
    _unboxed,
    as_dict,
    from_dict,
    from_file,
    load,
    override,
    read_values,
)

ROOT = Path(__file__).parents[1]
FILES = sorted(ROOT.glob("configs/**/*.toml"))
FIELDS = {f.name: f for f in dataclasses.fields(Config)}
# A value of the right type that is not the default, where the type alone does not give one that makes sense.
OTHERS = {"tile_k": "full", "tile_q": 64, "beta1": 0.5, "beta2": 0.5, "dropout": 0.5, "muon_momentum": 0.5,
          "n_embd": 1536, "monitor_ties": 0.5, "n_head": 6, "output_heads": "1:0", "shift_cap": float("inf")}


def test_there_are_configs():
    names = {str(path.relative_to(ROOT / "configs")) for path in FILES}
    assert {f"gpt2_small_{arm}.toml" for arm in ("flash_bf16", "flash_fp32", "flash_fa2", "standard",
                                                 "stabilized")} <= names
    assert sum(name.startswith("isolation/") for name in names) == 8 and sum("mini_" in name for name in names) >= 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_loads(path):
    """It loads, its numerics resolve, its head says what it is for, and it writes to a folder of its own name."""
    config = from_file(path)
    assert len(specs_of(config)) == config.n_layer
    assert path.read_text().startswith("# ")
    name = f"isolation_{path.stem}" if path.parent.name == "isolation" else path.stem
    assert config.out_dir == f"runs/{name}"
    assert load([str(path), "--seed=77"]) == dataclasses.replace(config, seed=77)


CARDS = {f"gpt2_{model}_{card}": f"gpt2_{model}_flash_bf16" for model in ("small", "medium")
         for card in ("80gb", "24gb")}


@pytest.mark.parametrize("name, base", CARDS.items())
def test_cards_differ_in_how_a_step_is_cut(name, base):
    """Up to 8 GPUs divide the micro-batches; order, validation and numerics are those of the paper's setup."""
    ours, theirs = (from_file(ROOT / "configs" / f"{stem}.toml") for stem in (name, base))
    changed = {key for key, value in as_dict(ours).items() if value != as_dict(theirs)[key]}
    assert changed <= {"out_dir", "batch_size", "gradient_accumulation_steps", "loss_chunk", "eval_iters"}
    assert ours.eval_iters * ours.batch_size == theirs.eval_iters * theirs.batch_size
    assert ours.sequences_per_step == theirs.sequences_per_step and ours.gradient_accumulation_steps % 8 == 0


def test_authors_differ_from_the_paper_as_their_code_does():
    ours, theirs = (from_file(ROOT / "configs" / f"gpt2_small_{stem}.toml") for stem in ("authors", "flash_bf16"))
    changed = {key for key, value in as_dict(ours).items() if value != as_dict(theirs)[key]}
    assert changed == {"out_dir", "batch_size", "gradient_accumulation_steps", "bias", "row_sum", "tile_q", "tile_k"}
    assert ours.tokens_per_step == 327_680 and ours.vocab_size == 50304


@pytest.mark.parametrize("family", ["gpt2_small", "gpt2_small_muon", "gpt2_medium", "mini", "cpu"])
def test_pairs_differ_in_their_attention_alone(family):
    arms = {}
    for path in FILES:
        family_of, *_ = path.stem.partition("_flash") if "_flash" in path.stem else path.stem.rpartition("_")
        alone = path.stem in CARDS or path.stem == "gpt2_small_authors"  # compared above
        if family_of == family and path.parent.name == "configs" and not alone:
            arms[path.stem] = tomllib.loads(path.read_text())
    assert len(arms) >= 2
    for name, table in arms.items():
        assert table.pop("attention") in name
        table.pop("out_dir")
    tables = list(arms.values())
    assert all(table == tables[0] for table in tables)


ISOLATION = {"3.2a": {"tile_k"}, "3.2b": {"attention_override"}, "3.2c": {"attention_override"},
             "3.2d": {"delta"}, "3.2e": {"delta"}, "3.2f": {"output", "pv"}, "3.2g": {"output_heads"}, "3.3.2": {"pv"}}


def test_isolation_differs_from_gpt2_small_in_what_it_isolates():
    base = tomllib.loads((ROOT / "configs" / "gpt2_small_flash_bf16.toml").read_text())
    found, numerics = {}, {tuple(specs_of(from_dict(base, "base")))}
    for path in FILES:
        if path.parent.name == "isolation":
            table = tomllib.loads(path.read_text())
            found[path.stem.split("_")[0]] = {k for k in table.keys() | base.keys()
                                              if table.get(k) != base.get(k)} - {"out_dir"}
            numerics.add(tuple(specs_of(from_file(path))))
    assert found == ISOLATION
    assert len(numerics) == 9  # no two compute the same


@pytest.mark.parametrize("table, words", [
    ({"batchsize": 3}, "unknown key 'batchsize'; the nearest known key is 'batch_size'"),
    ({"lr": 3}, "unknown key 'lr'"),
    ({"batch_size": "3"}, "batch_size='3' is not of type int"),
    ({"batch_size": 3.0}, "batch_size=3.0 is not of type int"),
    ({"batch_size": True}, "batch_size=True is not of type int"),
    ({"compile": 1}, "compile=1 is not of type bool"),
    ({"attention": "flash"}, "attention='flash' is not of type 'standard' | 'sdpa'"),
    ({"wandb_tags": ["a", 1]}, "wandb_tags=('a', 1) is not of type"),
    ({"max_iters": 0}, "max_iters=0 must be positive"),
    ({"weight_decay": -0.1}, "weight_decay=-0.1 must be zero or more"),
    ({"learning_rate": float("nan")}, "learning_rate=nan must be positive"),
    ({"beta2": 1.0}, "beta2=1.0 must be in [0, 1)"),
    ({"max_iters": 1 << 63}, "max_iters=9223372036854775808 must be below 2^63"),
    ({"eps": float("inf")}, "eps=inf cannot be computed with; give 1.2e-38 to 1e+18"),
    ({"min_lr": 1e300}, "min_lr=1e+300 cannot be computed with"),
    ({"collective_timeout_s": 1e10}, "collective_timeout_s=10000000000.0 cannot be computed with; give 1 to 1e+09"),
    ({"n_head": 5}, "n_embd=768 is not divisible by n_head=5"),
])
def test_wrong_values(table, words, tmp_path):
    with pytest.raises(ConfigError) as error:
        from_dict(table, "here")
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name, hint in HINTS.items() if float in (hint, *typing.get_args(hint))])
def test_every_float_has_bounds(name):
    """Of the sign that makes sense, and such that FP32 holds it: by the config itself, or by attention/spec.py."""
    rule = {"fixed_shift": {"stabilizer": "fixed"}, "lazy_threshold": {"stabilizer": "lazy_max"}}.get(name, {})
    for value in (-1.0, float("nan"), float("inf"), 1e300, 1e-300):
        if (name, value) in (("shift_cap", float("inf")), ("smooth_k", -1.0)):  # the paper's rule; a longer mean
            continue
        with pytest.raises(ValueError, match=f"{name}={re.escape(str(value))} "):
            specs_of(from_dict({"attention": "stabilized", **rule, name: value}, "here"))


def test_values_as_other_files_and_commits_have_them():
    """As JSON has infinity, and of the commits where smooth_k was all or nothing; other commits' keys and choices are
    theirs, but not other types."""
    assert from_dict({"smooth_k": True, "shift_cap": "Infinity"}, "") == Config(smooth_k=1.0, shift_cap=float("inf"))
    assert read_values({"smooth_k": "-Infinity"}, "") == {"smooth_k": float("-inf")}
    told = {"attention": "flash_new", "gone": [3], "beta": 2, "wandb_tags": ["a"], "tile_k": 64}
    assert read_values(told, "") == told | {"beta": 2.0, "wandb_tags": ("a",)}
    for key, value in (("attention", 3), ("smooth_k", "x"), ("beta", True), ("seed", "Infinity"), ("tile_k", 1.5)):
        with pytest.raises(ConfigError, match=f"run.json: {key}={value!r} is not of type"):
            read_values({key: value}, "run.json")
    with pytest.raises(ConfigError, match=r"file: learning_rate=100000000[.]+ is larger than any float"):
        from_dict({"learning_rate": 10**400}, "file")


@pytest.mark.parametrize("key, value", [("out_dir", "a\0b"), ("wandb_run_name", "\udcff"),
                                         ("wandb_tags", ("a", "\ud800"))])
def test_what_no_file_holds(key, value):
    with pytest.raises(ConfigError) as told:
        from_dict({key: value}, "here")
    assert str(told.value) == f"{key}={value!r} has a character that no log or file name holds; leave it out"
    Config(out_dir="größe ☃", wandb_tags=("ü",))


def test_a_box_is_a_sentence():
    """Drawn in Unicode, or in ASCII where a terminal has no more; test_user_errors.py has what tyro draws here."""
    for box in ("╭─ Value error ───╮\n│ Error parsing --seed: no  │\n│ integer: 'x'. │\n│ ─── │\n│ help │\n╰────╯\n",
                " Value error \n -------- \n  Error parsing --seed: no \n  integer: 'x'. \n  \n  help\n ----\n"):
        assert _unboxed(box) == "--seed: no integer: 'x'."
    assert _unboxed("told otherwise\n") == "told otherwise"


def test_wrong_files(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(f"seed = 1{'0' * 5000}\n")
    with pytest.raises(ConfigError, match=r"x\.toml is not valid TOML: Exceeds the limit"):
        from_file(path)
    path.write_text("batch_size = 3\nbatch_size = 4\n")
    for file, words in ((path, "is not valid TOML"), (tmp_path / "none.toml", "No such file"), (
            tmp_path / "mini_flash_bf61.toml", "No such .* directory; the nearest is .*configs/mini_flash_bf16.toml$")):
        with pytest.raises(ConfigError, match=words):
            from_file(file)
    path.write_text("batch_sizes = 3\n")
    with pytest.raises(ConfigError, match=r"x\.toml: unknown key 'batch_sizes'; the nearest known key is 'batch_size'"):
        load([str(path), "--seed=3"])


@pytest.mark.parametrize("flag, near", [
    ("--batchsize=3", "batch_size"), ("--learning_rat=1", "learning_rate"), ("--atention=sdpa", "attention"),
    ("--detla=dp_p", "delta"), ("--no-compile", "compile")])
def test_wrong_flag_names_the_nearest(flag, near):
    with pytest.raises(ConfigError, match=f"unknown flag {flag.partition('=')[0]}; the nearest is --{near}, and"):
        load(["--seed=3", flag])
    assert load(["--batch-size=3", "--learning_rate", "2"]) == Config(batch_size=3, learning_rate=2.0)


@pytest.mark.parametrize("argv, words", [
    (["--seed=1", "--seed=2"], "--seed is given more than once, --seed=1 and --seed=2; give it once"),
    (["--batch_size", "1", "--dropout=0", "--batch-size=1"], "--batch_size is given more than once, --batch_size and"),
    (["--init_from=resume", "--init_from=a.pt"], "--init_from is given more than once"),
    (["--seed=1", "--init_from=a.pt", "--seed=2", "--init_from=resume"], "--seed is given more than once")])
def test_a_flag_is_given_once(argv, words):
    with pytest.raises(ConfigError, match=words):
        load([str(FILES[0]), *argv])
    assert load(["--init_from=a.pt", "--init_from=resume"]) == Config(init_from="resume")  # the same command goes on


def test_flags_of_a_script_take_the_place_of_the_same_ones():
    given = ["a.toml", "--wandb_tags", "x", "y", "--bias=True", "--batch-size", "2"]
    flags = ["--wandb_tags=z", "--batch_size=3"]
    assert override(given, *flags) == ["a.toml", "--bias=True", *flags] and override(given) == given
    assert override(given, "--bias", "False") == [*given[:4], *given[5:], "--bias", "False"]


def test_help_lists_every_field(capsys):
    """Name, meaning and default; a field without a meaning is a field nobody can use."""
    with pytest.raises(SystemExit) as stop:
        load(["--help"])
    out = capsys.readouterr().out
    words = " ".join(out.replace("│", " ").split())
    assert stop.value.code == 0
    for name in FIELDS:
        flag = f"--{name}" if f"--{name} " in words else f"--{name.replace('_', '-')}"
        assert f"{flag} " in words, name
    assert "(default: 0.001)" in words and "AdamW's peak learning rate" in words
    source = (ROOT / "config.py").read_text()
    for name in FIELDS:
        line = next(line for line in source.splitlines() if line.startswith(f"    {name}: "))
        meaning = line.partition("  # ")[2]
        assert meaning and " ".join(meaning.split()) in words, name


def other_value(name: str):
    default = FIELDS[name].default
    if name in OTHERS:
        return OTHERS[name]
    hint = HINTS[name]
    if typing.get_origin(hint) is typing.Literal:
        return next(v for v in typing.get_args(hint) if v != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1
    if float in typing.get_args(hint):
        return 2.5
    if int in typing.get_args(hint):
        return 32
    return ("x", "y") if isinstance(default, tuple) else "x"


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_a_flag_and_a_key(name):
    """As --name=value, as --name-with-dashes and in a file: the same config, and every other field as it was."""
    value = other_value(name)
    assert value != FIELDS[name].default
    text = list(value) if isinstance(value, tuple) else [str(value)]
    flag = [f"--{name}", *text] if isinstance(value, tuple) else [f"--{name}={text[0]}"]
    head, *rest = flag[0].split("=", 1)
    dashes = ["=".join([head.replace("_", "-"), *rest]), *flag[1:]]
    wanted = dataclasses.replace(Config(), **{name: value})
    assert load(flag) == load(dashes) == wanted == from_dict({name: value}, "file")
    assert {k for k, v in as_dict(load(flag)).items() if v != as_dict(Config())[k]} == {name}


def test_switches_are_what_was_set():
    assert Config().switches == {}
    config = from_dict({"tile_k": "full", "beta": 4, "pv": "fp32"}, "here")
    assert config.switches == {"tile_k": 0, "beta": 4.0, "pv": "fp32"}
    assert specs_of(dataclasses.replace(config, attention="stabilized"))[3].tile_k == 0
    unset = {name for name, field in FIELDS.items() if field.default is None}
    every = dataclasses.replace(Config(), **{name: other_value(name) for name in unset})
    assert every.switches.keys() == unset  # no attention switch can be set without being passed on


def test_every_backend_and_switch_of_a_spec_can_be_set():
    """config.py imports nothing of ours, so it names them again."""
    assert typing.get_args(Backend) == BACKENDS
    assert {name for name, field in FIELDS.items() if field.default is None} == {*SWITCHES, "kernel"} - {"output_heads"}


def test_defaults_are_nanogpts():
    """A nanoGPT user's expectations: the total over ranks, and tokens a step that do not depend on their number."""
    config = from_file(ROOT / "configs" / "gpt2_small_flash_bf16.toml")
    assert config.tokens_per_step == 524_288 and config.sequences_per_step == 512


def test_a_config_file_that_does_not_come_first():
    with pytest.raises(ConfigError, match=r"configs/cpu_standard.toml comes first: train.py configs/cpu_standard.toml"):
        load(["--max_iters=3", "configs/cpu_standard.toml"])
