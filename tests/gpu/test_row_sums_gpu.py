"""What rows of dS add up to by the Triton kernels, beside the emulation and torch's kernels on the same GPU."""

import dataclasses

import pytest
import torch

from attention import AttentionSpec, attend, changed
from scripts.row_sums import attention_of, inputs, measure

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("delta", ["", "+delta=dp_p", "+delta=do_o_corrected", "+delta=do_o_exact"])
@pytest.mark.parametrize("backend", ["flash_fa2", "flash_bf16"])
def test_as_the_emulation_says(backend, delta):
    tensors = [x.cuda() for x in inputs([2, 4, 512, 64], 4.0)]
    specs = [dataclasses.replace(changed(AttentionSpec(), backend + delta), kernel=name)
             for name in ("triton", "emulated")]
    kernel, emulated = (measure(lambda q, k, v, spec=spec: attend(q, k, v, spec), *tensors) for spec in specs)
    assert kernel["left_over"] == pytest.approx(emulated["left_over"], rel=0.05)
    assert kernel["cosine"] == pytest.approx(emulated["cosine"], abs=0.05)
    assert (kernel["cosine"] > 0.9) == (backend + delta == "flash_fa2")


@pytest.mark.parametrize("arm, exact", [("sdpa/math", True), ("sdpa/flash", False)])
def test_torchs(arm, exact):
    found = measure(attention_of(arm), *(x.cuda() for x in inputs([2, 4, 512, 64], 4.0)))
    assert found["left_over"] < 1e-4 if exact else found["cosine"] > 0.9
