"""A diagnosis and the probes on a GPU: what the kernels left is what the emulation says, and norms are those of SVD."""

import numpy as np
import pytest
import torch
from tiny_runs import Runner, write_corpus

import distributed
from attention import AttentionLayer, AttentionSpec
from config import load
from diagnostics import scene as scenes
from diagnostics.diagnosis import diagnose
from diagnostics.precision import head_spec
from diagnostics.probes import as_record, measure
from diagnostics.weights import block_matrices, qk_entropy
from model import GPT, GPTConfig
from plan import prepare
from stop import StopSignal
from trainer import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU; tests/scripts runs on a CPU")

DEVICE, L, H, C, T, V = "cuda", 2, 2, 128, 256, 64


@pytest.fixture
def model():
    torch.manual_seed(0)
    one = GPT(GPTConfig(n_layer=L, n_head=H, n_embd=C, block_size=T, vocab_size=V),
              [AttentionLayer(AttentionSpec("flash_bf16"), i) for i in range(L)])
    with torch.no_grad():
        one.transformer.wpe.weight.zero_()  # a token that repeats has equal keys, so exact ties
        for block in one.transformer.h:
            block.attn.c_attn.weight.mul_(10)
    return one.to(DEVICE)


@pytest.fixture
def tokens():
    return torch.randint(0, 12, (2, T), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def autocast():
    return torch.autocast(DEVICE, torch.bfloat16)


def test_a_scene_of_the_kernels(model, tokens, tmp_path):
    """Captured on the GPU under the run's flags, saved in BF16, diagnosed on the CPU."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # as a capture of a run has it
    try:
        survey = scenes.survey(model, tokens, autocast(), 7)
        layer, head = scenes.worst_head(survey)
        frame = scenes.capture(model, tokens, tokens.roll(-1, 1), autocast(), layer, head, 7, 0.5)
    finally:
        torch.use_deterministic_algorithms(before)
    spec = head_spec(model.transformer.h[layer].attn.attend.spec, head)
    path = scenes.save(scenes.Scene("gpu", layer, head, spec, 4, [survey], [frame]), tmp_path / "scene.npz")
    with np.load(path) as file:
        assert all(file[f"{name}_0"].dtype == np.uint16 for name in ("x", "q", "k", "v", "o", "do"))
    found = diagnose(scenes.load(path))
    assert found["captured_equals_emulated"][0] > 0.995
    assert found["ties"][0]["share"]["exact"] > 0.1
    assert found["ties"][0]["share"]["exact"] == pytest.approx(survey.tied["exact"][layer][head], abs=0.01)
    weight = model.transformer.h[layer].attn.c_attn.weight.detach().double().cpu().numpy()
    norms = [np.linalg.norm(weight[h * C // H:(h + 1) * C // H], 2) for h in range(H)]
    assert found["figure3"]["wq_norm"] == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("exact", [True, False])
def test_a_probe_of_training(tmp_path, monkeypatch, exact):
    """Norms and entropies as a run logs them against SVD; ties and scores against a probe that waits."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # other tests may have asked for determinism
    flags = dict(device=DEVICE, dtype="bfloat16", attention="flash_bf16", n_embd=C, probe_interval=1)
    config = load(Runner(tmp_path, write_corpus(tmp_path / "data")).argv("run", **flags))
    trainer = Trainer(config, prepare(config), distributed.init(config.device), StopSignal())
    with torch.no_grad():
        for block in trainer.raw.transformer.h:
            block.attn.c_attn.weight.mul_(10)
    trainer.gradients()  # of whose first micro-batch a probe is
    for _ in range(0 if exact else 59):
        trainer.spectra.update(exact=False)
    record = trainer.probe(whole=True, exact=exact).record()
    again = as_record(measure(trainer.raw, trainer.first[: config.probe_sequences], trainer.autocast).tolist())
    assert again and again == {name: record[name] for name in again}
    assert trainer.probe(whole=False).record() == again
    for i, block in enumerate(trainer.raw.transformer.h):
        for kind, w in block_matrices(block).items():
            norm = np.linalg.norm(w.detach().double().cpu().numpy(), 2)
            assert record[f"probe/norm_{kind}/layer{i}"] == pytest.approx(norm, rel=1e-5 if exact else 5e-3)
            assert 0 <= record[f"probe/sign_diversity_{kind}/layer{i}"] <= 0.5
        weight = block.attn.c_attn.weight.detach().cpu()
        for n, name in enumerate(("wq", "wk", "wv")):
            norms = [np.linalg.norm(w.double().numpy(), 2) for w in weight[n * C:(n + 1) * C].split(C // H)]
            tolerance = 1e-5 if exact or name == "wq" else 5e-3
            assert record[f"probe/{name}_norm_head/layer{i}"] == pytest.approx(norms, rel=tolerance, abs=5e-5)
        assert record[f"probe/qk_entropy_head/layer{i}"] == pytest.approx(qk_entropy(weight, H).tolist(), abs=1e-4)
