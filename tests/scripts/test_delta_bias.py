"""delta_bias.py against the gradient that autograd finds, and against coherence's matrices, on a tiny run."""

import dataclasses
import json
import math

import pytest
import torch

from attention import AttentionLayer, AttentionSpec
from diagnostics import coherence
from diagnostics.bias import pushes
from diagnostics.precision import both, score_gradients
from diagnostics.scene import capture
from model import GPT, GPTConfig
from replay.switches import Switch
from scripts import delta_bias
from tests.scripts.test_diagnose import D, T, flags, run  # noqa: F401  the fixtures

B = 5


def frame_of(spec: AttentionSpec, head: int, **options):
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=T, vocab_size=256, **options),
                [AttentionLayer(spec, i) for i in range(2)])
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_attn.weight[:64].mul_(12)  # scores whose maxima tie in BF16
    x, y = torch.randint(0, 256, (2, B, T))
    return model, x, y, capture(model, x, y, torch.autocast("cpu", enabled=False), 1, head, 0)


@pytest.mark.parametrize("head, options", [(0, {}), (1, {}), (0, {"bias": True}), (1, {"gated_attention": True}),
                                           (0, {"qk_clip": 1.0})])
def test_the_exact_gradient_is_autograds(head, options):
    """-dW_Q of FP32 attention along W_Q's first singular pair, by a backward pass through the whole model."""
    spec = AttentionSpec("flash_fp32", tile_q=32, tile_k=32)
    model, x, y, frame = frame_of(spec, head, **options)
    model(x, y)[1].backward()
    weight = model.transformer.h[1].attn.c_attn.weight
    part = slice(head * D, (head + 1) * D)
    u, _, vt = torch.linalg.svd(weight[part].detach().double(), full_matrices=False)
    expected = -(u[:, 0] @ weight.grad[part].double() @ vt[0]).item()
    found = pushes(frame, spec)
    torch.testing.assert_close(found["dw"].float(), weight.grad[part], rtol=1e-3,
                               atol=1e-3 * weight.grad[part].abs().max().item())
    assert found["dw_error"].norm() < 1e-3 * found["dw"].norm()
    assert found["gradient"].shape == (B,)
    assert found["gradient"].sum().item() == pytest.approx(expected, rel=1e-3, abs=1e-9)
    for name in ("push", "row_sum", "error"):  # nothing is rounded to BF16
        assert found[name].abs().sum() < 1e-3 * found["gradient"].abs().sum(), name


@pytest.mark.parametrize("backend, switches", [("flash_bf16", {}), ("flash_bf16", {"delta": "dp_p"}),
                                               ("flash_bf16", {"pv": "fp32", "output": "fp32"}), ("flash_fa2", {})])
def test_the_error_is_that_of_the_backends_own_gradient(backend, switches):
    """dQ of the operator less the exact one of the same scores, along W_Q's first singular pair; but for dQ's own last
    rounding, of 2^-9 a token and with either sign."""
    spec = AttentionSpec(backend, tile_q=32, tile_k=32, kernel="emulated", **switches)
    *_, frame = frame_of(spec, 0)
    q, k, v = (getattr(frame, name)[:, None].bfloat16().requires_grad_() for name in "qkv")
    AttentionLayer(spec, 0)(q, k, v).backward(frame.do[:, None].bfloat16())
    u, _, vt = torch.linalg.svd(frame.wq.double(), full_matrices=False)
    along = -(q.grad[:, 0].double() @ u[:, 0]) * (frame.x.double() @ vt[0])
    found = pushes(frame, spec)
    torch.testing.assert_close(found["gradient"] + found["error"], along.sum(-1), rtol=0,
                               atol=(2**-7 * along.norm(dim=-1).max()).item())


def test_a_row_of_ds_adds_up_to_what_delta_leaves_over():
    """With exact dP all of it is delta's error; with dP rounded and delta made of the same dP nothing is left over but
    dS's own rounding, and with delta made of O the rounding of dP is."""
    parts = {}
    for name, switches in {"exact dP": {"scores": "fp32"}, "do_o": {}, "dp_p": {"delta": "dp_p"}}.items():
        spec = AttentionSpec("flash_bf16", tile_q=32, tile_k=32, **switches)
        *_, frame = frame_of(spec, 0)
        parts[name] = pushes(frame, spec)
    one = parts["exact dP"]
    assert (one["row_sum"] - one["push"]).norm() < 0.4 * one["push"].norm()
    sizes = {name: found["row_sum"].norm().item() for name, found in parts.items()}
    assert sizes["dp_p"] < 0.2 * sizes["do_o"], sizes


@pytest.mark.parametrize("head", [0, 1])
def test_what_o_left_over_takes_its_rounding_out_of_the_rows_of_ds(head):
    """Where O is all that is rounded, rows add up to 1/20 at most (1/666 to 1/713 measured), and so does dW_Q's error
    along them (1/710 to 1/1187). flash_fa2 rounds dS, which rows add up to whatever delta is, and P: delta's part of
    its error falls to a half and a third, with P in FP32 to 1/518 and 1/529."""
    rows, along, push = {}, {}, {}
    for name, switches in {"o alone": dict(backend="flash_fp32", output="bf16"), "fa2": dict(backend="flash_fa2"),
                           "p in fp32": dict(backend="flash_fa2", probs="fp32")}.items():
        for delta in ("do_o", "do_o_exact"):
            spec = AttentionSpec(**switches, delta=delta, tile_q=32, tile_k=32)
            *_, frame = frame_of(spec, head)
            pair, found = both(frame.q, frame.k, frame.v, spec, frame.do), pushes(frame, spec)
            rows[name, delta] = score_gradients(frame.q, frame.k, frame.v, frame.do, pair, spec).sum(-1).norm().item()
            along[name, delta], push[name, delta] = found["row_sum"].norm().item(), found["push"].norm().item()
    for size in (rows, along):
        assert size["o alone", "do_o_exact"] < size["o alone", "do_o"] / 20, size
    assert push["p in fp32", "do_o_exact"] < push["p in fp32", "do_o"] / 20, push
    assert push["fa2", "do_o_exact"] < 0.7 * push["fa2", "do_o"], push


def test_the_push_is_that_of_the_summed_matrices():
    """sum_T error[T] (PK)[T]^T X[T] by `coherence`, along the first singular pair, and its sum without it."""
    spec = AttentionSpec("flash_bf16", tile_q=32, tile_k=32)
    *_, frame = frame_of(spec, 0)
    pair = both(frame.q, frame.k, frame.v, spec, frame.do)
    error = coherence.gradient_error(coherence.rank_one(pair.p, frame.k, frame.x), pair.delta_error.flatten(), D)
    u, _, vt = torch.linalg.svd(frame.wq.double(), full_matrices=False)
    found = pushes(frame, spec)
    assert found["push"].sum().item() == pytest.approx((u[:, 0] @ error @ vt[0]).item(), rel=1e-9)
    assert found["sum"].tolist() == pytest.approx(pair.delta_error.sum(-1).tolist())
    assert (found["size"] > 0).all() and (found["push"].abs() <= found["size"] * math.sqrt(T) * (1 + 1e-9)).all()


def test_stochastic_rounding_draws_anew():
    """Two batches of the same sequences have other errors, and the exact gradient that they have."""
    spec = AttentionSpec("flash_bf16", output="stochastic", tile_q=32, tile_k=32)
    *_, frame = frame_of(spec, 0)
    one, two = (pushes(frame, spec, torch.tensor([0, 1, draw])) for draw in (0, 5))
    assert not torch.equal(one["push"], two["push"]) and torch.equal(one["gradient"], two["gradient"])


def test_a_run(run, capsys):  # noqa: F811
    """Both checkpoints, every head; more sequences than a step has come from the steps that follow, or, as the run
    ends, the last ones. A head given twice is one."""
    assert delta_bias.main([str(run), "--steps", "4:8", "--sequences", "12", "--device", "cpu"]) == 0
    rows = json.loads((run / "delta_bias.json").read_text())["rows"]
    assert [(r["step"], r["layer"], r["head"]) for r in rows] == [(4, 1, 0), (4, 1, 1), (8, 1, 0), (8, 1, 1)]
    assert all(r["sequences"] == 12 and r["wq_norm"] > 0 and r["sum_se"] > 0 and 0 <= r["tied"] < 1 for r in rows)
    assert all(r["push_t"] == pytest.approx(r["push"] / r["push_se"]) for r in rows)
    assert "written to" in capsys.readouterr().out
    argv = [str(run), "--steps", "12", "--sequences", "12", "--heads", "1", "1", "--device", "cpu"]
    assert delta_bias.main(argv) == 0
    (last,) = json.loads((run / "delta_bias.json").read_text())["rows"]
    assert (last["step"], last["sequences"]) == (12, 12)


def test_other_numerics_on_the_same_weights(run):  # noqa: F811
    """The run's own are "run"; FP32 attention has no error, and delta = rowsum(dP P) a smaller one than dO O."""
    argv = [str(run), "--steps", "8", "--sequences", "12", "--heads", "1", "--device", "cpu", "--numerics", "run",
            "delta=dp_p", "flash_fp32", "run"]
    assert delta_bias.main(argv) == 0
    rows = {r["numerics"]: r for r in json.loads((run / "delta_bias.json").read_text())["rows"]}
    assert list(rows) == ["run", "delta=dp_p", "flash_fp32"]
    found = json.loads((run / "delta_bias.json").read_text())
    assert found["seed"] == 3 and found["git_commit"] and found["data"] and found["device_name"] == "CPU"
    assert rows["flash_fp32"]["error_share"] < 1e-3 < rows["run"]["error_share"]
    assert abs(rows["delta=dp_p"]["row_sum"]) < abs(rows["run"]["row_sum"])
    figure = run / "delta_bias.png"
    drawn = figure.read_bytes()
    figure.unlink()
    assert delta_bias.main([str(run / "delta_bias.json"), "--draw"]) == 0 and figure.read_bytes() == drawn


def test_files_that_cannot_be_drawn(tmp_path, capsys):
    """What is none of the script's, and what is from before it measured what is drawn, with how to measure that."""
    other, old = tmp_path / "other.json", tmp_path / "old.json"
    other.write_text('{"rows": []}')
    old.write_text(json.dumps({"rows": [{"step": step, "layer": 1, "head": head, "sequences": 128, "push": 1e-6}
                                        for step in (500, 1000) for head in (0, 3)]}))
    for file, words in ((other, f"{other} is no --out of this script"), (old, f"{old} is from before this script "
            "measured error_share, so there is nothing to draw; measure the run again: scripts/delta_bias.py RUN "
            f"--steps 500,1000 --layer 1 --heads 0 3 --sequences 128 --out {old}\n")):
        assert delta_bias.main([str(file), "--draw"]) == 2
        assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))


def test_cosines_tell_a_bias_from_a_direction_whose_sign_changes():
    gradient, direction = torch.eye(3, dtype=torch.float64), torch.ones(3, 3, dtype=torch.float64)
    for signs, cosine in [((1, 1, 1, 1), 1.0), ((1, -1, 1, -1), -1 / 3)]:
        found = delta_bias.by_step([torch.stack([gradient, sign * direction]) for sign in signs])
        assert found == pytest.approx({"error_share": 3.0, "error_rank_one": 1.0, "error_cosine": cosine,
                                       "error_cosine_size": 1.0, "gradient_cosine": 1.0, "gradient_cosine_size": 1.0})


@pytest.mark.parametrize("argv, words", [(["--sequences", "1"], "--sequences=1 must be at least 2"),
                                         (["--layer", "2"], "--layer=2 is outside layers 0..1"),
                                         (["--heads", "1", "2"], "--heads 1 2: the run has heads 0..1"),
                                         (["--steps", "12"], "need the rows of 32 steps, and 12 were recorded"),
                                         (["--steps", "5"], "no checkpoint of step 5"),
                                         (["--numerics", "sdpa"], "--numerics sdpa: the roundings of that are torch's"),
                                         (["--numerics", "flash_bf17"], "--numerics flash_bf17, in a layer of"),
                                         (["--numerics", "softcap=5"], "--numerics softcap=5 has softcap between"),
                                         (["--out", "curves.png"], "curves.png would be both"),
                                         (["--out", "."], ". cannot be written")])
def test_what_a_user_can_change(run, argv, words, capsys):  # noqa: F811
    assert delta_bias.main([str(run), "--device", "cpu", *argv]) == 2
    assert words in capsys.readouterr().err


def test_numerics_fit_what_the_layer_was_switched_to(run, monkeypatch, capsys):  # noqa: F811
    """Told before the checkpoints before the switch are measured."""
    config, plan = delta_bias.open_run(run)
    last = delta_bias.checkpoint.step_of(delta_bias.chosen(run, ":")[-1])
    plan.switches = [Switch(last, 1, AttentionSpec("standard").key)]
    monkeypatch.setattr(delta_bias, "open_run", lambda *_: (config, plan))
    monkeypatch.setattr(delta_bias, "models_of", lambda *_: pytest.fail("read a checkpoint"))
    assert delta_bias.main([str(run), "--device", "cpu", "--sequences", "2", "--numerics", "delta=do_o"]) == 2
    assert "--numerics delta=do_o, in a layer of standard: " in capsys.readouterr().err


def test_what_is_not_finite_is_nan_and_drawn_again(run, tmp_path):  # noqa: F811
    """A shift of 200 leaves a row no P: its O is 0 / 0."""
    out, wrong = tmp_path / "found.json", "stabilizer=fixed+fixed_shift=200"
    assert delta_bias.main([str(run), "--device", "cpu", "--sequences", "2", "--out", str(out), "--heads", "0",
                            "--numerics", "run", wrong]) == 0
    for line in json.loads(out.read_text())["rows"]:
        assert (line["error_share"] == line["error_rank_one"] == line["push"] == "NaN") == (line["numerics"] == wrong)
    first = (tmp_path / "found.png").read_bytes()
    assert delta_bias.main([str(out), "--draw"]) == 0 and (tmp_path / "found.png").read_bytes() == first
    numbers = out.rename(tmp_path / "numbers.png")
    assert delta_bias.main([str(numbers), "--draw"]) == 2 and json.loads(numbers.read_text())


@pytest.mark.parametrize("option", ["qk_norm", "softcap"])
def test_a_run_with_something_between_w_q_and_the_scores_is_refused(run, monkeypatch, capsys, option):  # noqa: F811
    config, plan = delta_bias.open_run(run)
    if option == "softcap":
        plan.specs[:] = [dataclasses.replace(spec, softcap=5.0) for spec in plan.specs]
    else:
        config = dataclasses.replace(config, qk_norm=True)
    monkeypatch.setattr(delta_bias, "open_run", lambda *_: (config, plan))
    assert delta_bias.main([str(run), "--device", "cpu"]) == 2
    assert f"the run has {option} between them" in capsys.readouterr().err
