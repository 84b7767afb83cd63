"""What a remedy makes of a layer's spec, and when two specs round alike."""

import pytest

from attention import AttentionSpec, changed, layer_specs, same_numerics

FLASH = AttentionSpec("flash_bf16")


@pytest.mark.parametrize("remedy", ["stabilized", "standard", "flash_fp32", "stabilized+beta=4+shift_cap=3",
                                    "flash_bf16+tile_k=full"])
def test_a_backend_is_what_an_override_makes_of_it(remedy):
    for switches in ({}, {"delta": "dp_p"}, {"softcap": 30.0, "tile_q": 64}):
        used = {k: v for k, v in switches.items() if remedy != "standard" or k == "softcap"}
        spec = layer_specs(2, 4, "flash_bf16", switches)[1]
        override = layer_specs(2, 4, "flash_bf16", switches, f"1={remedy}")[1]
        assert changed(spec, remedy, switches) == override
        assert all(getattr(override, name) == value for name, value in used.items())


def test_a_switch_is_set_on_top():
    spec = AttentionSpec("flash_bf16", delta="dp_p", tile_k=64, kernel="emulated")
    assert changed(spec, "output=fp32") == AttentionSpec("flash_bf16", delta="dp_p", tile_k=64, output="fp32",
                                                         kernel="emulated")
    assert changed(spec, "output=fp32+pv=fp32").pv == "fp32"
    assert changed(FLASH, "stabilizer=paper+beta=3").beta == 3.0


def test_heads_that_keep_fp32():
    spec = AttentionSpec("flash_bf16", output_heads=(0, 1))
    assert changed(spec, "stabilized").output_heads == (0, 1) and changed(spec, "delta=dp_p").output_heads == (0, 1)
    assert changed(spec, "output=fp32").output_heads == changed(spec, "standard").output_heads == ()
    assert changed(spec, "flash_fp32").output_heads == ()


@pytest.mark.parametrize("remedy, message", [
    ("stabilised", "'stabilised' is no backend; choose from standard"), ("outptu=fp32", "is not SWITCH=VALUE"),
    ("output=fp64", "output='fp64' is not one of"), ("stabilized+beta", "'beta' is not SWITCH=VALUE"),
    ("stabilized+beta=x", "beta='x' is not a number"), ("standard+pv=bf16", "no switch pv"), ("", "'' is no backend"),
    ("beta=0.5", "beta=0.5 must exceed 1"), ("output_heads=1", "is not SWITCH=VALUE")])
def test_refused(remedy, message):
    with pytest.raises(ValueError, match=message):
        changed(FLASH, remedy)


def test_same_numerics():
    """Presets are names; switches that nothing reads change nothing; torch's own backends are unlike any other."""
    assert same_numerics(FLASH, FLASH)
    assert same_numerics(AttentionSpec("stabilized"), AttentionSpec("flash_bf16", stabilizer="capped"))
    assert same_numerics(FLASH, AttentionSpec("flash_bf16", beta=4.0, dots="ieee", lazy_threshold=1.0))
    assert not same_numerics(AttentionSpec("stabilized"), AttentionSpec("stabilized", beta=4.0))
    assert not same_numerics(FLASH, AttentionSpec("flash_bf16", output="fp32"))
    assert not same_numerics(FLASH, AttentionSpec("flash_bf16", tile_k=64))
    assert not same_numerics(AttentionSpec("standard"), AttentionSpec("sdpa"))


def test_a_switch_that_is_named_twice():
    """The last one won."""
    for say in (lambda text: changed(FLASH, text), lambda text: layer_specs(2, 4, "flash_bf16", {}, f"1={text}")):
        with pytest.raises(ValueError, match=r"flash_bf16[+]delta=dp_p[+]delta=do_o' names a switch twice"):
            say("flash_bf16+delta=dp_p+delta=do_o")
