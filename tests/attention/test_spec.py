"""Attention specs: what a preset resolves to, what a user may change, and what every mistake is answered with."""

import dataclasses
import math
import re

import pytest
import torch

from attention.layers import layer_specs, parse_tile
from attention.spec import (
    BACKENDS,
    CHOICES,
    DEFAULTS,
    FULL,
    NO_SWITCHES,
    PRESETS,
    SMALLEST_SHIFT,
    SWITCHES,
    AttentionSpec,
    from_key,
    has_switch,
)

# backend: operands, scores, probs, row_sum, pv, output, delta, stabilizer, tile_k
TABLE = {
    "standard": ("bf16", "bf16", "bf16", "fp32", "fp32", "bf16", "dp_p", "none", FULL),
    "sdpa": ("bf16", "fp32", "bf16", "fp32", "fp32", "bf16", "do_o", "none", FULL),
    "flash_bf16": ("bf16", "bf16", "bf16", "fp32", "bf16", "bf16", "do_o", "none", 128),
    "flash_fa2": ("bf16", "fp32", "bf16", "fp32", "fp32", "bf16", "do_o", "none", 64),
    "flash_fp32": ("fp32", "fp32", "fp32", "fp32", "fp32", "fp32", "do_o", "none", 32),
    "stabilized": ("bf16", "bf16", "bf16", "fp32", "bf16", "bf16", "do_o", "capped", 128),
}
NAMES = ("operands", "scores", "probs", "row_sum", "pv", "output", "delta", "stabilizer", "tile_k")
OTHER = dict(row_sum="bf16", pv="fp32", output="stochastic", delta="dp_p", stabilizer="lazy_max", probs="fp8_e5m2",
             beta=4.0, epsilon=0.01, shift_cap=3.0, fixed_shift=2.0, lazy_threshold=1.0, softcap=30.0, tile_q=64,
             tile_k=32, dots="ieee", output_heads=(0, 2))


def refused(message, *args, **kwargs):
    with pytest.raises(ValueError, match=re.escape(message)):
        AttentionSpec(*args, **kwargs)


@pytest.mark.parametrize("backend", TABLE)
def test_presets(backend):
    assert set(BACKENDS) == set(TABLE)
    spec = AttentionSpec(backend)
    assert tuple(getattr(spec, name) for name in NAMES) == TABLE[backend]
    assert all(getattr(spec, f.name) is not None for f in dataclasses.fields(spec)), "a spec is fully resolved"
    assert spec.stores_fp32 == (backend == "flash_fp32")
    assert not spec.keeps_rest
    assert spec.rounds_bf16 == (backend in ("flash_bf16", "flash_fa2", "stabilized"))
    assert (spec.tile_q, spec.kernel) == (128, "auto")


def test_default_is_the_papers_failing_arm():
    assert AttentionSpec() == AttentionSpec("flash_bf16")
    assert AttentionSpec().beta == 2 and AttentionSpec().epsilon == 1e-3


@pytest.mark.parametrize("shift", [SMALLEST_SHIFT, AttentionSpec().shift_cap])
def test_a_shift_that_rows_share_is_of_a_bf16_number_and_no_power_of_two(shift):
    p = torch.tensor(math.exp(-shift), dtype=torch.float64)
    assert p.bfloat16().double().item() == pytest.approx(p.item(), rel=1e-12) and math.frexp(p)[0] > 0.51


@pytest.mark.parametrize("name", OTHER)
def test_every_switch_can_be_set_on_a_preset_and_survives_its_key(name):
    spec = AttentionSpec("flash_bf16", **{name: OTHER[name]})
    assert getattr(spec, name) == OTHER[name]
    rest = dataclasses.asdict(spec) | {name: getattr(AttentionSpec(), name)}
    assert AttentionSpec(**rest) == AttentionSpec(), "a switch changes nothing else"
    again = from_key(spec.key)
    assert again == spec and hash(again) == hash(spec) and again.key == spec.key != AttentionSpec().key


def test_a_spec_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttentionSpec().pv = "fp32"


def test_key_keeps_infinity():
    assert from_key(AttentionSpec(stabilizer="paper", shift_cap=math.inf).key).shift_cap == math.inf


@pytest.mark.parametrize("name", CHOICES)
def test_unknown_choice(name):
    refused(f"{name}='bf17' is not one of {', '.join(CHOICES[name])}", **{name: "bf17"})


def test_unknown_backend():
    refused("attention='flash' is no backend; choose from standard, sdpa, flash_bf16", "flash")


@pytest.mark.parametrize("backend", NO_SWITCHES)
@pytest.mark.parametrize("name", OTHER)
def test_references_have_no_switches(backend, name):
    if name == "softcap" and backend == "standard":
        assert AttentionSpec(backend, softcap=30.0).softcap == 30
    else:
        value = OTHER[name] if OTHER[name] != PRESETS[backend].get(name) else CHOICES[name][0]
        refused(f"attention={backend} has no switch {name} (asked for {value!r})", backend, **{name: value})
    assert has_switch(backend, name) == (name == "softcap" and backend == "standard")
    assert has_switch(backend, "kernel") and AttentionSpec(backend, kernel="emulated").kernel == "emulated"
    assert AttentionSpec(backend, **PRESETS[backend]) == AttentionSpec(backend), "what it does anyway may be said"


@pytest.mark.parametrize(("name", "value"), [("tile_q", 0), ("tile_q", 8), ("tile_q", 48), ("tile_k", 8),
                                             ("tile_k", 100), ("tile_k", -16)])
def test_bad_tiles(name, value):
    refused(f"{name}={value} is not a power of two of at least 16", **{name: value})


def test_tiles():
    assert AttentionSpec(tile_q=16, tile_k=0).tile_k == FULL == parse_tile("full")
    assert parse_tile("64") == parse_tile(64) == 64


BAD_COMBINATIONS = [
    ("scores=bf16 rounds products of BF16 operands", dict(backend="flash_fp32", scores="bf16")),
    ("probs=bf16 needs operands=bf16", dict(backend="flash_fp32", probs="bf16")),
    ("probs=fp8_e4m3 needs operands=bf16", dict(backend="flash_fp32", probs="fp8_e4m3")),
    ("output_heads=(1,) with output=fp32: every head is FP32 already", dict(output="fp32", output_heads=(1,))),
    ("delta=do_o_exact with output=fp32 changes nothing", dict(output="fp32", delta="do_o_exact")),
    ("delta=do_o_exact with output=fp32 changes nothing", dict(backend="flash_fp32", delta="do_o_exact")),
    ("output_heads=(-1,) has a negative head", dict(output_heads=(-1,))),
    ("beta=1.0 must exceed 1", dict(beta=1.0)),
    ("beta=nan must exceed 1", dict(beta=math.nan)),
    ("beta=inf must be 0 or from 1.2e-38 to 1e+18", dict(beta=math.inf)),
    ("epsilon=-0.1 must be 0 or from 1.2e-38 to 1", dict(epsilon=-0.1)),
    ("epsilon=nan must be 0 or from", dict(epsilon=math.nan)),
    ("epsilon=2 must be 0 or from", dict(epsilon=2)),
    ("softcap=inf must be 0 or from", dict(softcap=math.inf)),
    ("softcap=1e-300 must be 0 or from", dict(softcap=1e-300)),
    ("fixed_shift=-1.0 must be 0 or from 1.2e-38 to 1e+18", dict(fixed_shift=-1.0)),
    ("lazy_threshold=inf must be 0 or from", dict(lazy_threshold=math.inf)),
    ("shift_cap=1e+300 must be 0 or from", dict(shift_cap=1e300)),
    ("shift_cap=0.0 must be positive", dict(shift_cap=0.0)),
    ("shift_cap=nan must be positive", dict(shift_cap=math.nan)),
    ("stabilizer=capped needs a finite shift_cap", dict(backend="stabilized", shift_cap=math.inf)),
    ("probs=fp8_e4m3 with stabilizer=capped and shift_cap=12.0008: the largest P of a row may be",
     dict(backend="stabilized", probs="fp8_e4m3")),
    ("give a shift_cap below 11, or probs=bf16", dict(stabilizer="paper", shift_cap=math.inf, probs="fp8_e5m2")),
    ("fixed_shift=7: the largest P", dict(stabilizer="fixed", fixed_shift=7, probs="fp8_e4m3")),
]


@pytest.mark.parametrize(("message", "switches"), BAD_COMBINATIONS, ids=[m for m, _ in BAD_COMBINATIONS])
def test_combinations_that_make_no_sense(message, switches):
    refused(message, **switches)


def test_fp8_probabilities_with_a_small_shift():
    for switches in (dict(shift_cap=6.0), *(dict(stabilizer=s) for s in ("fixed", "lazy_max", "clamp"))):
        assert AttentionSpec("stabilized", probs="fp8_e4m3", **switches).probs == "fp8_e4m3"


def test_description_names_every_rounding():
    text = AttentionSpec(output_heads=(0, 7), softcap=30.0, stabilizer="paper", tile_k=FULL).describe()
    for part in ("flash_bf16 ", "operands=bf16 ", "scores=bf16 ", "probs=bf16 ", "row_sum=fp32 ", "pv=bf16 ",
                 "output=bf16 ", "delta=do_o ", "fp32_heads=0,7 ", "softcap=30 ",
                 "stabilizer=paper(beta=2,epsilon=0.001,cap=12.0008)", "tiles=128xfull"):
        assert part in text, f"{part!r} is missing from {text!r}"
    assert "dots=tf32x3" in AttentionSpec("flash_fp32").describe() and "dots" not in text
    assert AttentionSpec(stabilizer="fixed").describe().count("stabilizer=fixed(shift=1)") == 1
    assert "stabilizer=lazy_max(threshold=5.55)" in AttentionSpec(stabilizer="lazy_max").describe()
    assert "stabilizer=clamp " in AttentionSpec(stabilizer="clamp").describe()
    assert "delta = rowsum(dP P)" in AttentionSpec("standard", softcap=5.0).describe()
    assert "softcap=5" in AttentionSpec("standard", softcap=5.0).describe()
    assert "fused kernel" in AttentionSpec("sdpa").describe()
    assert len({AttentionSpec(b).describe() for b in BACKENDS}) == len(BACKENDS)


# A model's layers.


def backends(*args, **kwargs):
    return [s.backend for s in layer_specs(*args, **kwargs)]


def layers_refused(message, **kwargs):
    with pytest.raises(ValueError, match=re.escape(message)):
        layer_specs(**dict(n_layer=3, n_head=4, backend="flash_bf16") | kwargs)


def test_overrides_by_layer():
    assert backends(3, 4, "flash_bf16") == ["flash_bf16"] * 3
    assert backends(3, 4, "flash_bf16", override="1=standard") == ["flash_bf16", "standard", "flash_bf16"]
    assert backends(3, 4, "sdpa", override="1=flash_bf16,default=standard") == ["standard", "flash_bf16", "standard"]
    own = layer_specs(2, 4, "flash_bf16", override="1=flash_bf16+output=fp32+tile_k=64+beta=4")
    assert own[0] == AttentionSpec() and own[1] == AttentionSpec(output="fp32", tile_k=64, beta=4.0)
    full = layer_specs(1, 4, "sdpa", override="default=flash_fa2+tile_k=full")
    assert full == [AttentionSpec("flash_fa2", tile_k=FULL)]


def test_switches_reach_the_layers_that_have_them():
    specs = layer_specs(3, 4, "flash_bf16", switches=dict(delta="dp_p", pv=None, softcap=20.0), override="1=standard")
    assert [s.delta for s in specs] == ["dp_p"] * 3 and [s.softcap for s in specs] == [20.0] * 3
    assert specs[0] == AttentionSpec(delta="dp_p", softcap=20.0) and specs[1] == AttentionSpec("standard", softcap=20.0)
    own = layer_specs(2, 4, "flash_bf16", switches=dict(tile_k=64), override="1=flash_bf16+tile_k=32")
    assert [s.tile_k for s in own] == [64, 32], "an override's own switch wins"


def test_heads_that_keep_fp32():
    specs = layer_specs(4, 8, "flash_bf16", output_heads="1:0,7,6,0;3:2")
    assert [s.output_heads for s in specs] == [(), (0, 6, 7), (), (2,)]


OVERRIDES = {
    "3=standard": "attention_override item '3=standard' is not LAYER=BACKEND or default=BACKEND with a layer of 0..2",
    "-1=standard": "with a layer of 0..2",
    "x=standard": "with a layer of 0..2",
    "1": "attention_override item '1' is not LAYER=BACKEND",
    "1=standard,1=sdpa": "names layer 1 twice",
    "1=flash": "attention='flash' is no backend",
    "1=": "attention='' is no backend",
    "1=flash_bf16+pv": "'pv' is not SWITCH=VALUE with a switch of smooth_k, operands, scores",
    "1=flash_bf16+pvv=fp32": "'pvv=fp32' is not SWITCH=VALUE",
    "1=flash_bf16+output_heads=1": "'output_heads=1' is not SWITCH=VALUE",
    "1=flash_bf16+kernel=triton": "'kernel=triton' is not SWITCH=VALUE",
    "1=flash_bf16+beta=two": "beta='two' is not a number",
    "1=flash_bf16+tile_k=all": "tile_k='all' is not a number",
    "1=flash_bf16+pv=fp16": "pv='fp16' is not one of bf16, fp32",
    "1=standard+pv=bf16": "attention=standard has no switch pv",
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_bad_overrides(override):
    layers_refused(OVERRIDES[override], override=override)


HEADS = {
    "1": "output_heads item '1' is not LAYER:HEAD,HEAD,...",
    "1:": "output_heads item '1:' is not LAYER:HEAD,HEAD,...",
    "1:a": "output_heads item '1:a' is not LAYER:HEAD,HEAD,...",
    "1:-1": "output_heads item '1:-1' is not LAYER:HEAD,HEAD,...",
    "3:0": "output_heads item '3:0' is outside layers 0..2, heads 0..3",
    "1:0,4": "output_heads item '1:0,4' is outside layers 0..2, heads 0..3",
}


@pytest.mark.parametrize("heads", HEADS)
def test_bad_output_heads(heads):
    layers_refused(HEADS[heads], output_heads=heads)


def test_a_switch_that_no_layer_has():
    layers_refused("tile_k=64 changes nothing: no layer's backend (standard) has that switch", backend="standard",
                   switches=dict(tile_k=64))
    layers_refused("softcap=5.0 changes nothing: no layer's backend (sdpa) has that switch", backend="sdpa",
                   switches=dict(softcap=5.0))
    layers_refused("attention=standard has no switch output_heads", backend="standard", output_heads="1:0")


def test_defaults_are_the_dataclass_fields():
    assert set(SWITCHES) == set(DEFAULTS) - {"backend", "kernel"}
    assert set(CHOICES) <= set(DEFAULTS) and all(set(p) == set(NAMES) for p in PRESETS.values())


@pytest.mark.parametrize("name, value, backend, message", [
    ("beta", 4.0, "flash_bf16", "beta=4.0 changes nothing: it is read with stabilizer=paper|capped|unconditional, and "
     "no layer has that (stabilizer=none)"),
    ("shift_cap", 3.0, "flash_fa2", "shift_cap=3.0 changes nothing"),
    ("fixed_shift", 3.0, "stabilized", "fixed_shift=3.0 changes nothing: it is read with stabilizer=fixed"),
    ("lazy_threshold", 3.0, "stabilized", "lazy_threshold=3.0 changes nothing: it is read with stabilizer=lazy_max"),
    ("dots", "ieee", "flash_bf16", "dots='ieee' changes nothing: it is read with operands=fp32, and no layer has that "
     "(operands=bf16)")])
def test_a_switch_that_no_layer_reads_is_refused(name, value, backend, message):
    layers_refused(message, backend=backend, switches={name: value})
    reader = {"beta": "stabilized", "shift_cap": "stabilized", "dots": "flash_fp32"}.get(name)
    if reader:
        override = f"1={reader}"
        assert getattr(layer_specs(2, 4, backend, switches={name: value}, override=override)[1], name) == value
    else:
        rule = {"fixed_shift": "fixed", "lazy_threshold": "lazy_max"}[name]
        assert getattr(layer_specs(1, 4, backend, switches={name: value, "stabilizer": rule})[0], name) == value


def test_repeats_are_refused():
    layers_refused("output_heads='1:0;1:1' names layer 1 twice", output_heads="1:0;1:1")
    layers_refused("names the default twice", override="default=standard,default=sdpa")
