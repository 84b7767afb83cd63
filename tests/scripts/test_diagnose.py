"""A tiny run, diagnosed end to end; what the JSON says is computed again from the model, step by step."""

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
from attention import AttentionLayer, AttentionSpec
from attention.rounding import round_bf16
from config import Config
from diagnostics import diagnosis
from diagnostics import scene as scenes
from diagnostics.words import words
from model import GPT, GPTConfig
from replay.order import OrderFile
from replay.switches import Switch, plain
from scripts import delta_bias, diagnose

ROOT = Path(__file__).resolve().parents[2]
FLAGS = dict(device="cpu", dtype="float32", compile=False, n_layer=2, n_head=2, n_embd=32, block_size=64, batch_size=4,
             gradient_accumulation_steps=2, max_iters=12, warmup_iters=2, learning_rate=2e-2, eval_interval=4,
             eval_iters=2, checkpoint_interval=4, keep_checkpoints=3, probe_interval=4, attention="flash_bf16",
             tile_k=32, record=True, seed=3)
FIGURES = {f"figure{n}.png" for n in (3, 4, 5, 6, 11, 12, 13)}
N, S, T, D = 3, 8, 64, 16  # sequences asked for and of a step, tokens, head size


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of 12 steps with checkpoints at 4, 8 and 12, in a process of its own: training sets signals and flags."""
    root = tmp_path_factory.mktemp("diagnose")
    draw, corpus = random.Random(7), root / "tiny"
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(2, 8))) for _ in range(30)]
    corpus.mkdir()
    for split, tokens in (("train", 20_000), ("val", 2_000)):
        text = " ".join(draw.choices(words, k=tokens))[:tokens].encode()
        (corpus / f"{split}.bin").write_bytes(np.frombuffer(text, dtype=np.uint8).astype("<u2").tobytes())
    splits = {split: {"tokens": len(raw := (corpus / f"{split}.bin").read_bytes()) // 2,
                      "sha256": hashlib.sha256(raw).hexdigest()} for split in ("train", "val")}
    meta = {"tokenizer": "bytes", "vocab_size": 256, "dtype": "uint16", "splits": splits}
    (corpus / "meta.json").write_text(json.dumps(meta))
    flags = [f"--{k}={v}" for k, v in (FLAGS | {"out_dir": root / "run", "dataset": corpus}).items()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "train.py", *flags], cwd=ROOT, env=environment, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return root / "run"


@pytest.fixture(autouse=True, scope="module")
def flags():
    """A capture sets the run's determinism flags; afterwards they are what they were."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="module")
def diagnosed(run) -> tuple[Path, dict]:
    assert diagnose.main([str(run), "--sequences", str(N), "--device", "cpu"]) == 0
    out = run / "diagnosis"
    return out, json.loads((out / "diagnosis.json").read_text())


def direct(run: Path, step: int, layer: int, head: int):
    """One layer's q, k, v, x and dO of the recorded row, in the model that checkpoint `step` holds: autograd alone."""
    state = checkpoint.load(run / f"ckpt_{step:08d}.pt")
    spec = AttentionSpec("flash_bf16", tile_k=32)
    model = GPT(GPTConfig(**state["model_args"]), [AttentionLayer(spec, i) for i in range(2)])
    model.load_state_dict(state["model"])
    with OrderFile(run / "order.bin") as order:
        offsets = order.row(min(step, order.rows - 1))[:N]
    data = np.fromfile(run.parent / "tiny" / "train.bin", dtype="<u2").astype(np.int64)
    x, y = (torch.from_numpy(np.stack([data[o + s:o + s + T] for o in offsets])) for s in (0, 1))
    block, seen = model.transformer.h[layer], {}

    def attend(q, k, v):
        seen.update(q=q, k=k, v=v, o=block.attn.attend.__class__.forward(original, q, k, v))
        seen["o"].retain_grad()
        return seen["o"]

    original = block.attn.attend
    block.attn.attend.forward = attend
    block.ln_1.register_forward_hook(lambda _m, _a, out: seen.__setitem__("x", out))
    loss = model(x, y)[1] * N / S
    loss.backward()
    picked = {n: round_bf16(seen[n][:, head].detach()) for n in "qkv"} | {"do": round_bf16(seen["o"].grad[:, head])}
    return picked | {"x": seen["x"].detach(), "o": seen["o"][:, head].detach(), "tokens": x,
                     "wq": model.transformer.h[layer].attn.c_attn.weight.detach()[head * D:(head + 1) * D],
                     "weights": [b.attn.c_attn.weight.detach().numpy() for b in model.transformer.h]}


def test_the_worst_head_and_the_captured_tensors(run, diagnosed):
    """Largest W_Q norm by SVD names the head; every tensor of the scene is what a plain forward and backward gives."""
    out, found = diagnosed
    scene = scenes.load(out / "scene.npz")
    assert found["steps"] == [4, 8, 12] and (found["layer"], found["head"]) == (scene.layer, scene.head)
    for frame in scene.frames:
        expected = direct(run, frame.step, scene.layer, scene.head)
        for name in ("tokens", "q", "k", "v", "do", "o", "x", "wq"):
            assert torch.equal(getattr(frame, name), expected[name]), (frame.step, name)
    norms = np.array([[np.linalg.svd(w[h * D:(h + 1) * D].astype(np.float64), compute_uv=False)[0] for h in range(2)]
                      for w in expected["weights"]])
    assert norms[scene.layer, scene.head] >= 0.95 * norms.max()
    assert found["figure3"]["wq_norm"] == pytest.approx(norms[scene.layer], rel=1e-9)
    assert scene.sequences_per_step == S and not torch.equal(scene.frames[0].wq, scene.frames[1].wq)


def test_numbers_are_those_of_a_direct_computation(run, diagnosed):
    """Delta's error, ties, the error of dW_Q and figure 6, from the run's own stored O and NumPy in float64."""
    found, scene = diagnosed[1], scenes.load(diagnosed[0] / "scene.npz")
    layer, head = found["layer"], found["head"]
    errors, matrices = [], []
    for i, step in enumerate(found["steps"]):
        t = {n: (x.double() if torch.is_tensor(x) else x) for n, x in direct(run, step, layer, head).items()}
        s = round_bf16(round_bf16((t["q"].float() @ t["k"].float().mT).double()) / D**0.5)
        s = s.masked_fill(~torch.ones(T, T).tril().bool(), -torch.inf)
        pbar = (s - s.amax(-1, keepdim=True)).exp()
        p = pbar / pbar.sum(-1, keepdim=True)
        delta_error = (t["do"] * (t["o"] - p @ t["v"])).sum(-1)
        errors.append(delta_error)
        tied = ((s == s.amax(-1, keepdim=True)).sum(-1) > 1).double().mean().item()
        assert found["ties"][i]["share"]["exact"] == pytest.approx(tied, abs=0.02)
        assert found["captured_equals_emulated"][i] > 0.999
        common = t["k"].mean(1, keepdim=True)
        means = common.norm(dim=-1)[:, 0] / (t["k"] - common).square().sum(-1).mean(-1).sqrt()
        assert found["key_mean"][i] == pytest.approx(means.max().item(), rel=1e-5)
        assert found["shares"][i]["sum"] == pytest.approx(delta_error.sum().item(), rel=0.02, abs=1e-8)
        assert found["figure5a"]["per_step"][i] == pytest.approx(found["shares"][i]["sum"] * S / N)
        error = torch.einsum("bt,btd,btc->dc", delta_error, p @ t["k"], t["x"]) / D**0.5
        assert found["coherence"]["error"][i]["norm"] == pytest.approx(error.norm().item(), rel=0.02)
        matrices.append(error)
        for rule, near in (("exact", 0.0), ("epsilon", 1e-3)):
            counted = ((s >= s.amax(-1, keepdim=True) - near).sum(-1) > 1).double().mean().item()
            assert scene.surveys[i].tied[rule][layer][head] == pytest.approx(counted, abs=0.02)
            assert found["ties"][i]["share"][rule] == pytest.approx(counted, abs=0.02)
        assert found["heads"]["tied"]["one"][layer][head] == found["ties"][-1]["share"]["one"]
    assert found["figure5a"]["steps_cumulative"] == pytest.approx(np.cumsum(found["figure5a"]["per_step"]))
    first, last = (direct(run, step, layer, head)["wq"].double() for step in (found["steps"][0], found["steps"][-1]))
    growth, total = found["coherence"]["growth_in_all"], sum(matrices[:-1])
    cosine = torch.nn.functional.cosine_similarity((last - first).flatten(), total.flatten(), 0).item()
    assert growth["cosine"] == pytest.approx(cosine, rel=0.05, abs=1e-3)
    assert growth["spectral"]["after"] == pytest.approx(np.linalg.svd(last)[1][0])
    assert sum(found["figure5a"]["sum"]) == pytest.approx(sum(e.sum().item() for e in errors), rel=0.02, abs=1e-8)
    assert found["figure5a"]["cumulative"][-1] == pytest.approx(sum(found["figure5a"]["sum"]), abs=1e-15)
    bc, six = found["figure5bc"], found["figure6"]
    b, token, feature = bc["sequence"], bc["token"], six["feature"]
    assert bc["delta_error"] == pytest.approx(errors[-1][b, token].item(), rel=0.01)
    assert bc["do"] == t["do"][b, token].tolist()
    assert sum(bc["product"]) == pytest.approx(bc["delta_error"], rel=1e-4)
    assert feature == int(np.argmax(bc["product"]))
    assert found["figure12"]["delta_error"] == pytest.approx(errors[-1][b].tolist(), rel=0.02, abs=1e-9)
    assert six["p"] == pytest.approx(pbar[b, token, :token + 1].tolist(), rel=1e-9)
    assert six["v"] == t["v"][b, :token + 1, feature].tolist()
    low = torch.cumsum(round_bf16(pbar[b, token, :token + 1]) * t["v"][b, :token + 1, feature], 0)
    high = torch.cumsum(pbar[b, token, :token + 1] * t["v"][b, :token + 1, feature], 0)
    assert six["prefix_error"] == pytest.approx((round_bf16(low.float()).double() - high).tolist(), abs=1e-6)
    assert six["ones"] == (round_bf16(pbar[b, token]) == 1).nonzero()[:, 0].tolist()


def test_series_are_those_of_the_log(run, diagnosed):
    """Figures 11 and 13 take the run's own log, and norms at checkpoints by SVD."""
    found = diagnosed[1]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name, key in (("val_loss", "val_loss"), ("tied_share", f"probe/ties/layer{found['layer']}")):
        series = [[r[k] for r in records if key in r] for k in ("step", key)]
        assert found["figure13"][name] == series
        assert len(found["figure13"][name][0]) >= 3
    assert found["figure11"]["logged_largest_head"]["1"][0] == [0, 4, 8]
    assert found["figure11"]["logged"]["MLP_up"]["0"] == [[r[k] for r in records if "probe/norm_MLP_up/layer0" in r]
                                                          for k in ("step", "probe/norm_MLP_up/layer0")]
    weight = checkpoint.load(run / "ckpt_00000008.pt")["model"]["transformer.h.1.attn.c_attn.weight"].double().numpy()
    assert found["figure11"]["norms"]["W_K"][1][1] == pytest.approx(np.linalg.svd(weight[32:64])[1][0], rel=1e-9)


def test_what_is_written(run, diagnosed, tmp_path, capsys):
    """All files; the page says layer, head and the numbers; the scene alone gives the same, byte for byte."""
    out, found = diagnosed
    assert {p.name for p in out.iterdir()} == FIGURES | {"diagnosis.json", "diagnosis.md", "scene.npz"}
    page = " ".join((out / "diagnosis.md").read_text().split())
    assert f"layer {found['layer']}, head {found['head']}" in page and f"{found['shares'][-1]['sum']:+.2e}" in page
    assert f"{found['ties'][-1]['share']['one']:.1%} of rows have several P = 1" in page
    assert f"made of is {', '.join(f'{x:.3g}' for x in found['key_mean'])} times as long" in page
    assert all(f"]({name})" in page for name in FIGURES)
    assert diagnose.main(["--scene", str(out / "scene.npz"), "--out", str(tmp_path / "again")]) == 0
    for name in ("diagnosis.json", "diagnosis.md"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()
    assert {p.name for p in (tmp_path / "again").iterdir()} == FIGURES | {"diagnosis.json", "diagnosis.md"}
    assert "Ties." in capsys.readouterr().out


def test_a_model_of_many_layers(diagnosed, tmp_path):
    """Twelve layers of twelve heads, one step, nothing logged and no ties: every figure is drawn all the same."""
    scene = scenes.load(diagnosed[0] / "scene.npz")
    one = scene.surveys[-1]
    wide = dataclasses.replace(one, head_norms=[[[1.0] * 12] * 3] * 12, qk_entropy=[[2.0] * 12] * 12,
                               ties=[[0.0] * 12] * 12, matrix_norms={k: [1.0] * 12 for k in one.matrix_norms})
    spread = torch.arange(T).float()[None, :, None] * 50 - 1000
    frame = dataclasses.replace(scene.frames[-1], q=torch.full((N, T, D), 0.5), k=spread.expand(N, T, D))
    found = diagnose.write(dataclasses.replace(scene, layer=11, head=11, surveys=[wide], frames=[frame], history={}),
                           tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == FIGURES | {"diagnosis.json", "diagnosis.md"}
    assert found["ties"][0]["share"] == {"exact": 0.0, "epsilon": 0.0, "one": 0.0}
    assert found["ties"][0]["places"]["mean_distance"] is None and found["ties"][0]["tokens"] == []


def test_choices(run, tmp_path):
    """--steps takes a part of the ring, one checkpoint alone included; --layer and --head are obeyed."""
    command = [str(run), "--steps", "5:8", "--layer", "0", "--head", "1", "--sequences", "1", "--out", str(tmp_path)]
    assert diagnose.main(command) == 0
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    assert (found["steps"], found["layer"], found["head"], found["sequences"]) == ([8], 0, 1, 1)
    assert found["coherence"]["growth"] == [] and found["figure4"]["steps"] == [8, 8]
    assert "Growth" not in (tmp_path / "diagnosis.md").read_text()


def test_a_scene_alone(run, diagnosed, tmp_path, capsys):
    """--save-scene writes that file only: the steps of a list, and with --tokens the leading positions, which are
    exactly those of the whole sequences; figures and page follow from it."""
    path = tmp_path / "kept" / "small.npz"
    argv = [str(run), "--steps", "12,8", "--sequences", "2", "--tokens", "40", "--save-scene", str(path)]
    assert diagnose.main([*argv, "--device", "cpu"]) == 0
    assert f"{path}: layer {diagnosed[1]['layer']}, head {diagnosed[1]['head']}, steps 8, 12" in capsys.readouterr().out
    assert [p.name for p in path.parent.iterdir()] == ["small.npz"]
    scene, whole = scenes.load(path), scenes.load(diagnosed[0] / "scene.npz")
    assert [f.step for f in scene.frames] == [8, 12] == [s.step for s in scene.surveys]
    for frame, full in zip(scene.frames, whole.frames[1:], strict=True):
        for name in ("tokens", "q", "k", "v", "o", "x", "lse"):
            assert torch.equal(getattr(frame, name), getattr(full, name)[:2, :40]), name
        # Mean losses of 2 and of 3 sequences, each scaled to a step's, differ in FP32's last place.
        torch.testing.assert_close(frame.do, full.do[:2, :40], rtol=2**-7, atol=1e-9)
        assert torch.equal(frame.wq, full.wq)
    assert diagnose.main(["--scene", str(path), "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "diagnosis.json").read_text())
    assert (found["steps"], found["sequences"], found["tokens"]) == ([8, 12], 2, 40)
    assert {p.name for p in (tmp_path / "out").iterdir()} == FIGURES | {"diagnosis.json", "diagnosis.md"}


def test_a_switched_layer(run, diagnosed, tmp_path, capsys):
    """A layer that the monitor moved at step 10: each checkpoint is diagnosed with what it computed then, and the two
    sides are not mixed."""
    moved = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("diagnosis"))
    layer, spec = diagnosed[1]["layer"], AttentionSpec("stabilized", tile_k=32)
    state = checkpoint.load(moved / "ckpt_00000012.pt")
    state["switches"] = plain([Switch(10, layer, spec.key)])
    checkpoint.save(moved, state.pop("step"), state, 3)
    found = {}
    for steps in ("12:", "4:8"):
        path = tmp_path / f"{steps[0]}.npz"
        assert diagnose.main([str(moved), "--steps", steps, "--device", "cpu", "--save-scene", str(path)]) == 0
        found[steps] = scenes.load(path).spec
    assert found["12:"] == spec and found["4:8"].describe() == diagnosed[1]["attention"]
    capsys.readouterr()
    assert diagnose.main([str(moved), "--device", "cpu", "--save-scene", str(tmp_path / "no.npz")]) == 2
    assert f"layer {layer} was switched to another attention between steps 8 and 12" in capsys.readouterr().err


def test_a_run_that_went_on_with_other_settings(run, tmp_path, capsys):
    """Each checkpoint is read with the settings that it was saved with, however far the run went with others since;
    both sides at once are refused, by delta_bias.py too. Settings that read nothing may differ."""
    moved = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("diagnosis"))
    state = checkpoint.load(moved / "ckpt_00000012.pt")
    state["config"] |= {"delta": "dp_p", "smooth_k": 1.0, "learning_rate": 1e-3, "max_iters": 20}
    checkpoint.save(moved, state.pop("step"), state, 3)
    scene, found = tmp_path / "scene.npz", {}
    for steps in ("12", "4:8"):
        assert diagnose.main([str(moved), "--steps", steps, "--device", "cpu", "--save-scene", str(scene)]) == 0
        found[steps] = scenes.load(scene).spec
    assert (found["4:8"].delta, found["4:8"].smooth_k) == ("do_o", 0) and found["4:8"].tile_k == 32
    assert (found["12"].delta, found["12"].smooth_k) == ("dp_p", 1)
    capsys.readouterr()
    for script, out in ((diagnose, "no"), (delta_bias, "no.json")):
        assert script.main([str(moved), "--device", "cpu", "--out", str(tmp_path / out)]) == 2
        assert ("ckpt_00000008.pt was saved with smooth_k=None, delta=None, ckpt_00000012.pt with smooth_k=1.0, "
                "delta='dp_p', which cannot be mixed; choose one side with --steps") in capsys.readouterr().err
    (moved / "order.bin").unlink()  # then rows are drawn by the seed, or another file has them
    for path, seed in (("ckpt_00000004.pt", 3), ("ckpt_00000008.pt", 4)):
        state = checkpoint.load(moved / path)
        state["config"] |= {"record": False, "seed": seed}
        torch.save(state, moved / path)
    assert diagnose.main([str(moved), "--steps", "4:8", "--device", "cpu", "--save-scene", str(scene)]) == 2
    assert "ckpt_00000004.pt was saved with seed=3, ckpt_00000008.pt with seed=4" in capsys.readouterr().err
    assert diagnose.main([str(moved), "--steps", "4", "--device", "cpu", "--save-scene", str(scene)]) == 0


def test_user_errors(run, tmp_path, capsys):
    """One sentence and status 2, with the values at fault."""
    (tmp_path / "no.npz").write_bytes(b"nothing")
    for command, message in (
            ([], "give a RUN or --scene FILE"), ([str(run), "--scene", "x"], "give a RUN or --scene FILE"),
            ([str(run), "--steps", "5:7"], "has no checkpoint in --steps=5:7; it has 4, 8, 12"),
            ([str(run), "--steps", "x"], "--steps=x is neither a:b"),
            ([str(run), "--steps", "4:x"], "--steps=4:x is neither a:b"),
            ([str(run), "--steps", "8,9,10"], "has no checkpoint of step 9, 10 (--steps=8,9,10); it has 4, 8, 12"),
            ([str(run), "--tokens", "0"], "--tokens=0"), ([str(run), "--tokens", "65"], "exceeds the run's block_size"),
            (["--scene", "x", "--save-scene", "y"], "--save-scene=y takes a RUN"),
            (["--scene", "x", "--steps", "8"], "--steps=8 takes a RUN, of which --scene=x is what was captured"),
            (["--scene", "x", "--layer", "0", "--head", "1"], "--layer=0 takes a RUN"),
            (["--scene", "x", "--sequences", "2"], "--sequences=2 takes a RUN"),
            ([str(run), "--layer", "1"], "give both --layer and --head"),
            ([str(run), "--layer", "2", "--head", "0"], "outside layers 0..1, heads 0..1"),
            ([str(run), "--sequences", "0"], "--sequences=0"),
            ([str(run), "--dataset", str(tmp_path)], "has no train.bin"),
            ([str(tmp_path / "none")], "has no checkpoint (ckpt_*.pt)"),
            (["--scene", str(tmp_path / "none.npz")], "there is no scene"),
            (["--scene", str(tmp_path / "no.npz")], "is no scene that can be read")):
        assert diagnose.main([*command, "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error, error
    assert not (tmp_path / "out").exists()


def test_a_run_that_stopped_before_its_first_step(run, tmp_path, capsys):
    moved = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("diagnosis", "ckpt_*"))
    state = checkpoint.load(run / "ckpt_00000004.pt") | {"step": 0}
    torch.save(state, moved / "ckpt_00000000.pt")
    with OrderFile(run / "order.bin") as order:
        rows = order.header.row_bytes * order.rows
    os.truncate(moved / "order.bin", (moved / "order.bin").stat().st_size - rows)
    assert diagnose.main([str(moved), "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
    assert f"{moved} stopped before its first step, so there is nothing to diagnose; train" in capsys.readouterr().err


def test_an_order_file_that_was_cut_off(run, tmp_path, capsys):
    """The last row that it has is not the run's last one."""
    moved = shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("diagnosis"))
    with OrderFile(moved / "order.bin") as order:
        cut = order.header.row_bytes * 4
    os.truncate(moved / "order.bin", (moved / "order.bin").stat().st_size - cut)
    assert diagnose.main([str(moved), "--steps", "4:", "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
    assert (f"{moved / 'order.bin'} holds 8 steps, fewer than the 12 of {moved / 'ckpt_00000012.pt'}; take a whole "
            "copy of it") in capsys.readouterr().err


def test_worst_head_rule():
    """A W_Q norm that stands out decides; then many ties; else the largest norm, and within 5 % the share of ties."""
    def survey(norms, ties):
        return scenes.Survey(0, [[layer, layer, layer] for layer in norms], {}, [], ties, {}, 1)

    assert scenes.worst_head(survey([[1, 2], [9, 3]], [[0, 0.9], [0, 0]])) == (1, 0)
    assert scenes.worst_head(survey([[8.8, 2], [9, 3]], [[0.3, 0.39], [0.1, 0]])) == (0, 0)
    assert scenes.worst_head(survey([[8.8, 2], [9, 3]], [[0.3, 0.41], [0.1, 0]])) == (0, 1)
    assert scenes.worst_head(survey([[8.8, 2], [9, 3]], [[0, 0], [0, 0]])) == (1, 0)
    default = Config()
    assert (scenes.OUTLIER, scenes.TIED) == (default.monitor_wq_ratio, default.monitor_ties)


def test_what_lies_between_w_q_and_the_scores_is_told(run):
    """Coherence and growth take q for W_Q x; the page of a run where that is not so says it."""
    scene = diagnose.capture_run(run, "4", 1, 0, 2)
    assert "between W_Q x and the scores" not in " ".join(words(diagnosis.diagnose(scene)).split())
    scene.qk_norm, scene.spec = True, dataclasses.replace(scene.spec, softcap=30.0)
    page = words(diagnosis.diagnose(scene))
    assert "has qk_norm and softcap between W_Q x and the scores" in " ".join(page.split())
    assert max(map(len, page.splitlines())) <= 120


def test_a_scene_loses_nothing(tmp_path):
    """Values BF16 can hold are stored in two bytes, others in four, all exactly; non-finite models are refused."""
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn(2, 5, 7, generator=draw)
    tensors = {name: (round_bf16(wide) if name in "qkv" else wide + i) for i, name in enumerate(scenes.TENSORS[1:])}
    frame = scenes.Frame(3, torch.arange(10).view(2, 5), **tensors)
    scene = scenes.Scene("a", 1, 2, AttentionSpec(stabilizer="capped"), 8,
                         [scenes.Survey(3, [[[1.0]] * 3], {"W_Q": [1.0]}, [[0.5]], [[0.25]], {"one": [[0.5]]}, 10)],
                         [frame],
                         {"l": [[], []]}, qk_norm=True)
    path = scenes.save(scene, tmp_path / "a" / "scene.npz")
    with np.load(path) as file:
        assert file["q_0"].dtype == np.uint16 and file["x_0"].dtype == np.float32
    again = scenes.load(path)
    for name in scenes.TENSORS:
        assert torch.equal(getattr(again.frames[0], name), getattr(frame, name))
    assert dataclasses.replace(again, frames=[]) == dataclasses.replace(scene, frames=[])

    model = GPT(GPTConfig(n_layer=1, n_head=2, n_embd=32, block_size=8, vocab_size=16),
                [AttentionLayer(AttentionSpec(), 0)])
    model.transformer.wpe.weight.data[2] = torch.nan
    idx = torch.zeros(1, 8, dtype=torch.int64)
    with pytest.raises(scenes.SceneError, match=r"step 5: q, k, v, do of layer 0, head 1 are not finite"):
        scenes.capture(model, idx, idx, contextlib.nullcontext(), 0, 1, 5)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
