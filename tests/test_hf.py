"""Hugging Face GPT-2 in and out; the oracle is the transformers implementation."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
import transformers

from config import ConfigError
from hf import load_pretrained, read_pretrained, save_pretrained
from model import GPT, GPTConfig

SHAPE = dict(n_layer=2, n_head=4, n_embd=64, vocab_size=101)


def exact(q, k, v, stats=False):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def gpt(**fields):
    config = GPTConfig(**SHAPE | dict(block_size=32, bias=True, gelu="tanh") | fields)
    return GPT(config, [exact] * config.n_layer).eval()


def randomise(model, std=0.1):
    """Weights as large as trained ones, biases and norms included, so that no term hides behind a 0 or a 1."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(std * torch.randn(p.shape, generator=generator))
    return model


def all_logits(model, idx):
    return model(idx, torch.zeros_like(idx))[0]


@pytest.fixture(scope="module")
def idx():
    return torch.randint(0, SHAPE["vocab_size"], (3, 32), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def theirs():
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_positions=32, **SHAPE, bos_token_id=None, eos_token_id=None)
    return randomise(transformers.GPT2LMHeadModel(config).eval())


@pytest.fixture(scope="module")
def folder(theirs, tmp_path_factory):
    path = tmp_path_factory.mktemp("hf") / "model"
    theirs.save_pretrained(path)
    return path


@pytest.mark.parametrize("container", ["model.safetensors", "pytorch_model.bin", "without prefix"])
def test_loaded_logits_equal_transformers(theirs, folder, idx, container, tmp_path):
    source = folder
    if container != "model.safetensors":
        state, source = theirs.state_dict(), tmp_path
        (source / "config.json").write_text((folder / "config.json").read_text())
        if container == "without prefix":  # as the released files: no prefix, no head, causal masks among the tensors
            state = {k.removeprefix("transformer."): v for k, v in state.items() if not k.startswith("lm_head")}
            state["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
        torch.save(state, source / "pytorch_model.bin")
    model = gpt()
    load_pretrained(model, str(source))
    with torch.no_grad():
        want, got = theirs(idx).logits, all_logits(model, idx)
    assert want.std() > 0.5
    assert (got - want).abs().max() < 1e-4


def test_exact_gelu_and_tanh_differ_by_more_than_the_tolerance(theirs, folder, idx):
    """Else the test above would not notice the wrong one."""
    model = gpt()
    load_pretrained(model, str(folder))
    other = gpt(gelu="exact")
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert (all_logits(other, idx) - all_logits(model, idx)).abs().max() > 3e-4


@pytest.mark.parametrize("fields", [{}, {"bias": False}, {"gelu": "exact"}, {"bias": False, "gelu": "exact"}],
                         ids=lambda f: ",".join(f"{k}={v}" for k, v in f.items()) or "GPT-2")
def test_saved_logits_equal_in_transformers_and_come_back(fields, idx, tmp_path):
    torch.manual_seed(3)
    model = randomise(gpt(**fields))
    save_pretrained(model.config, model.state_dict(), tmp_path / "out")
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        want = all_logits(model, idx)
        assert (theirs.eval()(idx).logits - want).abs().max() < 1e-4
        back = gpt(**fields | {"bias": True})
        load_pretrained(back, str(tmp_path / "out"))
        assert torch.equal(all_logits(back, idx), want) or not model.config.bias
        assert (all_logits(back, idx) - want).abs().max() < 1e-5


def test_round_trip_keeps_every_bit(folder, tmp_path):
    config, weights = read_pretrained(str(folder))
    save_pretrained(config, weights, tmp_path / "again")
    config_again, again = read_pretrained(str(tmp_path / "again"))
    assert config_again == config
    assert set(again) == set(weights) and all(torch.equal(again[name], weights[name]) for name in weights)


def test_padding_added_on_loading_costs_less_than_its_bound(folder, idx):
    model, padded = gpt(), gpt(vocab_size=128)
    load_pretrained(model, str(folder))
    load_pretrained(padded, str(folder))
    with torch.no_grad():
        (logits, loss), (padded_logits, padded_loss) = model(idx, idx), padded(idx, idx)
    assert torch.allclose(padded_logits[..., :101], logits, atol=1e-5)
    assert 0 < padded_loss - loss <= math.log(1 + 27 / 101)


def test_padding_is_dropped_only_on_request(idx, tmp_path):
    model = randomise(gpt(vocab_size=128))
    save_pretrained(model.config, model.state_dict(), tmp_path / "all")
    save_pretrained(model.config, model.state_dict(), tmp_path / "real", vocab_size=101)
    assert read_pretrained(str(tmp_path / "all"))[0].vocab_size == 128
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "real").eval()
    with torch.no_grad():
        assert (theirs(idx).logits - all_logits(model, idx)[..., :101]).abs().max() < 1e-4
    with pytest.raises(ConfigError, match=r"vocab_size=200 .*1\.\.128"):
        save_pretrained(model.config, model.state_dict(), tmp_path / "more", vocab_size=200)


def test_shorter_block_keeps_the_first_positions(theirs, folder, idx):
    model = gpt(block_size=16)
    load_pretrained(model, str(folder))
    with torch.no_grad():
        assert (all_logits(model, idx[:, :16]) - theirs(idx[:, :16]).logits).abs().max() < 1e-4


def test_a_model_that_does_not_fit_is_told_every_flag(folder):
    with pytest.raises(ConfigError, match=r"--n_layer=2 --bias=True --gelu=tanh --qk_norm=False"):
        load_pretrained(gpt(n_layer=3, bias=False, gelu="exact", qk_norm=True), str(folder))
    with pytest.raises(ConfigError, match=r"--block_size=32 \(or less\) --vocab_size=101 \(or more\)"):
        load_pretrained(gpt(block_size=64, vocab_size=64), str(folder))


@pytest.mark.parametrize("key, value", [("activation_function", "relu"), ("layer_norm_epsilon", 1e-6), ("n_inner", 100),
                                        ("scale_attn_by_inverse_layer_idx", True), ("model_type", "llama")])
def test_a_computation_that_the_model_lacks_is_refused(folder, tmp_path, key, value):
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: value}))
    with pytest.raises(ConfigError, match=f"{key}={value!r}"):
        read_pretrained(str(tmp_path))


def test_incomplete_and_damaged_folders(folder, tmp_path):
    with pytest.raises(ConfigError, match=r"neither scratch, resume, .*, gpt2, gpt2-medium nor a folder"):
        read_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"neither model.safetensors nor pytorch_model.bin"):
        read_pretrained(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model.safetensors cannot be read"):
        read_pretrained(str(tmp_path))
    for text, message in (("[]", "is no GPT-2 config"), ('{"n_layer": "2", "n_head": 2, "n_embd": 32}', "wrong type")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        read_pretrained(str(tmp_path))


def test_pickled_objects_are_not_executed(folder, tmp_path):
    class Harm:
        def __reduce__(self):
            return (open, (str(tmp_path / "harm"), "w"))

    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    torch.save({"wte.weight": Harm()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pretrained(str(tmp_path))
    assert not (tmp_path / "harm").exists()


def test_offline_names_the_way_out(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"openai-community/gpt2-medium .*hf download .*--init_from=DIR") as caught:
        read_pretrained("gpt2-medium")
    assert "\n" not in str(caught.value)


def test_options_and_full_folders_are_refused_on_export(folder, tmp_path):
    model = gpt(gated_attention=True, logit_softcap=30.0)
    with pytest.raises(ConfigError, match="gated_attention, logit_softcap cannot be exported"):
        save_pretrained(model.config, model.state_dict(), tmp_path / "out")
    plain = gpt()
    with pytest.raises(ConfigError, match=r"already holds a config\.json"):
        save_pretrained(plain.config, plain.state_dict(), folder)
