"""scripts/sample.py and scripts/export_hf.py on small checkpoints, as a user calls them."""

import base64
import dataclasses

import numpy as np
import pytest
import torch
import transformers

import checkpoint
from attention import AttentionLayer, AttentionSpec
from config import Config, as_dict
from model import GPT, GPTConfig
from replay.switches import Switch, plain
from scripts import diagnose, diagnose_hf, export_hf
from scripts import sample as script

TEXT = "abcdefgh" * 8


def write_run(out, tokenizer="bytes", real=257, step=7, prefix="", trained=True, **fields):
    """A checkpoint as train.py writes it, of a tiny model that has learnt TEXT by heart; returns the model."""
    torch.manual_seed(0)
    shape = dict(n_layer=1, n_head=2, n_embd=32, block_size=32, vocab_size=-(-real // 64) * 64) | fields
    config = Config(out_dir=str(out), attention="standard", **shape)
    args = GPTConfig(**shape)
    model = GPT(args, [AttentionLayer(AttentionSpec("flash_fp32"), i) for i in range(args.n_layer)])
    data = torch.from_numpy(np.frombuffer(TEXT.encode(), np.uint8).astype(np.int64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60 if trained else 0):
        starts = torch.randint(0, 8, (8, 1))
        window = starts + torch.arange(33)
        optimizer.zero_grad()
        model(data[window[:, :-1]], data[window[:, 1:]])[1].backward()
        optimizer.step()
    state = {"model": {prefix + k: v for k, v in model.state_dict().items()}, "config": as_dict(config),
             "model_args": dataclasses.asdict(args), "data": {"tokenizer": tokenizer, "vocab_size": real}}
    checkpoint.save(out, step, state, keep=3)
    return model.eval()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "bytes"
    return out, write_run(out, bias=True, gelu="tanh")


def test_a_learnt_text_is_continued(run, capsys):
    out, _ = run
    assert script.main([str(out), "--prompt", "abcd", "--max_new_tokens", "40", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == ("abcdefgh" * 6)[:44] + "\n"  # past block_size too


@pytest.mark.parametrize("attention", ["flash_fp32", "run", "sdpa"])
def test_checkpoint_files_prefixes_and_backends(tmp_path, attention, capsys):
    write_run(tmp_path, prefix="_orig_mod.")
    path = str(checkpoint.latest(tmp_path))
    assert script.main([path, "--prompt=gh", "--max_new_tokens=6", "--temperature=0", f"--attention={attention}"]) == 0
    assert capsys.readouterr().out == "ghabcdef\n"


def test_seeds_repeat_and_samples_differ(run):
    out, _ = run
    options = dict(prompt="", count=3, max_new_tokens=20, temperature=5.0, top_k=0, device="cpu")
    first = script.sample(str(out), seed=1, **options)
    assert first == script.sample(str(out), seed=1, **options)
    assert first != script.sample(str(out), seed=2, **options)
    assert len(set(first)) == 3


def test_padding_is_never_drawn(tmp_path):
    """257 real tokens in 320 rows: at a high temperature padding would come up within a few draws."""
    write_run(tmp_path, trained=False)
    model, name, n_tokens = script.load_model(str(tmp_path))
    assert (name, n_tokens, model.config.vocab_size) == ("bytes", 257, 320)
    start = torch.zeros(50, 1, dtype=torch.int64)
    drawn = model.generate(start, 20, temperature=100.0, n_tokens=n_tokens)
    assert 200 < drawn.max() <= 256
    assert model.generate(start, 20, temperature=100.0).max() > 256


def test_a_gpt2_checkpoint_decodes_with_local_merge_ranks(tmp_path, capsys):
    import base64

    ranks = tmp_path / "ranks.tiktoken"  # the 256 bytes and one merge
    pairs = [bytes([i]) for i in range(256)] + [b"ab"]
    ranks.write_bytes(b"".join(base64.b64encode(token) + f" {i}\n".encode() for i, token in enumerate(pairs)))
    model = write_run(tmp_path / "run", tokenizer="gpt2", real=258)
    arguments = [str(tmp_path / "run"), "--prompt=ab", "--max_new_tokens=3", "--temperature=0", f"--gpt2_ranks={ranks}"]
    assert script.main(arguments) == 0
    ids = model.generate(torch.tensor([[256]]), 3, temperature=0, n_tokens=258)[0].tolist()
    want = b"".join(pairs[i] for i in ids if i != 257).decode("utf-8", "replace")
    assert want.startswith("ab") and capsys.readouterr().out.splitlines()[-1] == want.splitlines()[-1]


def test_a_soft_cap_on_the_scores_is_part_of_the_sampled_model():
    config = Config(n_layer=2, n_head=2, n_embd=32, attention="flash_bf16", softcap=5.0, attention_override="1=sdpa")
    assert [(s.backend, s.softcap) for s in script.sampling_specs(config, "flash_fp32")] == [("flash_fp32", 5.0),
                                                                                          ("flash_fp32", 0.0)]
    assert [s.backend for s in script.sampling_specs(config, "run")] == ["flash_bf16", "sdpa"]
    with pytest.raises(ValueError, match="sdpa has no switch softcap"):
        script.sampling_specs(config, "sdpa")


@pytest.mark.parametrize("arguments, message", [
    (["{out}/nowhere"], "nowhere has no checkpoint"),
    (["{out}", "--temperature=-1"], "temperature=-1.0"),
    (["{out}", "--top_k=-3"], "top_k=-3"),
    (["{out}", "--max_new_tokens=0"], "--max_new_tokens=0 must be at least 1"),
    (["{out}", "--seed=-1"], "seed=-1 must be zero or more"),
    (["{out}", "--seed=18446744073709551616"], "seed=18446744073709551616 must be below 2^63"),
    (["{out}", "--attention=flash9"], "attention='flash9' is no backend"),
])
def test_mistakes_end_in_one_sentence(run, arguments, message, capsys):
    assert script.main([a.format(out=run[0]) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""


def test_a_foreign_checkpoint_is_named(tmp_path, capsys):
    checkpoint.save(tmp_path, 1, {"weights": torch.ones(2)}, keep=1)
    assert script.main([str(tmp_path)]) == 2
    assert "has no entry 'config'; it is not a checkpoint of train.py" in capsys.readouterr().err
    assert diagnose.main([str(tmp_path)]) == 2
    assert "has no entry 'config'; it is not a checkpoint of train.py" in capsys.readouterr().err
    assert export_hf.main([str(tmp_path), str(tmp_path / "hf")]) == 2
    assert "has no entry 'config'; it is not a checkpoint of train.py" in capsys.readouterr().err


def test_an_exported_run_loads_in_transformers_and_samples_from_its_folder(run, tmp_path, capsys):
    out, model = run
    assert export_hf.main([str(out), str(tmp_path / "hf")]) == 0
    assert "wrote step 7" in (said := capsys.readouterr().out) and "63 of them padding (--vocab_size=257" in said
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    idx = torch.randint(0, 257, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (theirs(idx).logits - model(idx, idx)[0]).abs().max() < 1e-4
        again, name, n_tokens = script.load_model(str(tmp_path / "hf"))
        assert torch.allclose(again(idx)[0], model(idx)[0], atol=1e-5) and (name, n_tokens) == ("gpt2", 320)
    assert export_hf.main([str(out), str(tmp_path / "real"), "--vocab_size=257"]) == 0
    assert script.load_model(str(tmp_path / "real"))[2] == 257
    ranks = tmp_path / "ranks"
    ranks.write_bytes(b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
                      + b"".join(base64.b64encode(b"%d " % i) + b" %d\n" % (256 + i) for i in range(100)))
    assert script.main([str(tmp_path / "hf"), f"--gpt2_ranks={ranks}"]) == 2
    assert "has 320 tokens, but its tokenizer would be gpt2 with 357" in capsys.readouterr().err
    assert export_hf.main([str(out), str(tmp_path / "hf")]) == 2
    assert "already holds a config.json" in capsys.readouterr().err


def test_a_layer_that_the_monitor_moved_is_read_with_the_attention_it_has(tmp_path, capsys):
    """A remedy may be a soft cap, which weights that were trained with it need; a switch of a later step is none."""
    write_run(tmp_path / "run", trained=False, n_layer=2)
    state = checkpoint.load_latest(tmp_path / "run")
    switches = [Switch(5, 1, AttentionSpec("flash_bf16", softcap=3.0).key), Switch(8, 0, AttentionSpec("sdpa").key)]
    state["switches"] = plain(switches)
    checkpoint.save(tmp_path / "moved", state.pop("step"), state, keep=1)
    for attention, backends in (("run", ["standard", "flash_bf16"]), ("flash_fp32", ["flash_fp32"] * 2)):
        model, _, _ = script.load_model(str(tmp_path / "moved"), attention)
        specs = [block.attn.attend.spec for block in model.transformer.h]
        assert [s.backend for s in specs] == backends and [s.softcap for s in specs] == [0.0, 3.0]
    assert export_hf.main([str(tmp_path / "moved"), str(tmp_path / "hf")]) == 2
    assert "softcap=3 on the scores of layer 1: it cannot be exported" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("main, argv", [(script.main, ["run"]), (diagnose.main, ["run"]),
                                        (diagnose_hf.main, ["model", "--text=x"])], ids=["sample", "diagnose", "hf"])
def test_an_unknown_device_is_a_sentence(main, argv, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*argv, "--device=gpu"])
    assert stop.value.code == 2 and "--device: invalid choice: 'gpu' (choose from" in capsys.readouterr().err
