"""Which rounding, which layer, which heads: the paper's isolation experiments (sections 3.2 and 3.3.2), over seeds,
and what they leave open: is it the sign of the errors or their size, and which rounding is enough by itself?

    python scripts/isolate.py --dataset data/mini [--seeds 1 2 3 4 5] [--steps 10000] [--out runs/rates]

For each seed flash_bf16 runs too, and from its recorded norms this script proposes the layer and the heads that fail,
which the arms then confirm or refute. How runs are made and counted: rates.py. Writes isolation.json and isolation.png
into --out, where arms that cures.py has too are run once for both.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.outcomes import FAILS, STABLE, UNTRIED, Arm
from scripts.rates import main

ARMS = {
    "flash_bf16": Arm((), FAILS, "3.1"),
    # the authors' released code: one tile, and the row sum that eager PyTorch keeps in BF16
    "released_code": Arm(("--row_sum=bf16", "--tile_q=512", "--tile_k=512"), FAILS, "code"),
    "no_tiling": Arm(("--tile_k=full",), FAILS, "3.2"),
    "flash_in_that_layer_only": Arm(("--attention_override={layer}=flash_bf16,default=standard",), FAILS, "3.2"),
    "standard_in_that_layer": Arm(("--attention_override={layer}=standard",), STABLE, "3.2"),
    "delta_dp_p": Arm(("--delta=dp_p",), STABLE, "3.2"),
    "delta_dp_p_normalized": Arm(("--delta=dp_p_normalized",)),
    "delta_corrected": Arm(("--delta=do_o_corrected",)),
    "o_exact_delta": Arm(("--delta=do_o_exact",)),
    "o_recomputed": Arm(("--delta=do_o_recomputed",), STABLE, "3.2"),
    "o_fp32": Arm(("--output=fp32", "--pv=fp32"), STABLE, "3.2"),
    "o_fp32_outlier_heads": Arm(("--output_heads={layer}:{heads}",), STABLE, "3.2"),
    "o_fp32_worst_head": Arm(("--output_heads={layer}:{head}",), UNTRIED, "-"),
    "pv_fp32": Arm(("--pv=fp32",), STABLE, "3.3.2"),
    # Bias or size: unbiased errors, larger than BF16's; of O's last rounding, of P V's additions, of both, without P's.
    "output_stochastic": Arm(("--output=stochastic",)),
    "pv_stochastic": Arm(("--pv=stochastic",)),
    "pv_output_stochastic": Arm(("--pv=stochastic", "--output=stochastic")),
    "pv_fp32_output_stochastic": Arm(("--pv=fp32", "--output=stochastic")),
    "probs_fp32_pv_output_stochastic": Arm(("--probs=fp32", "--pv=stochastic", "--output=stochastic")),
    # What is enough: flash_fa2 rounds operands, P and the stored O alone, the third arm of these nothing but O.
    "flash_fa2": Arm(("--attention=flash_fa2",)),
    "fa2_output_stochastic": Arm(("--attention=flash_fa2", "--output=stochastic")),
    "fp32_output_bf16": Arm(("--attention=flash_fp32", "--output=bf16")),
    "sdpa": Arm(("--attention=sdpa",)),
    # Is it along the mean key? With scores in FP32, and that mean taken out, or two to eight times as long.
    "fa2_smooth_k": Arm(("--attention=flash_fa2", "--smooth_k=1")),
    "mean_key_4": Arm(("--smooth_k=-3",)),
    "fa2_mean_key_2": Arm(("--attention=flash_fa2", "--smooth_k=-1")),
    "fa2_mean_key_4": Arm(("--attention=flash_fa2", "--smooth_k=-3")),
    "fa2_mean_key_8": Arm(("--attention=flash_fa2", "--smooth_k=-7")),
    "delta_dp_p_mean_key_4": Arm(("--delta=dp_p", "--smooth_k=-3")),
    "fa2_delta_dp_p_mean_key_4": Arm(("--attention=flash_fa2", "--delta=dp_p", "--smooth_k=-3")),
    "fa2_delta_dp_p_mean_key_8": Arm(("--attention=flash_fa2", "--delta=dp_p", "--smooth_k=-7")),
    "fa2_delta_corrected_mean_key_8": Arm(("--attention=flash_fa2", "--delta=do_o_corrected", "--smooth_k=-7")),
    # and what takes it away under flash_fa2
    "fa2_o_fp32": Arm(("--attention=flash_fa2", "--output=fp32")),
    "fa2_delta_dp_p": Arm(("--attention=flash_fa2", "--delta=dp_p")),
    "fa2_delta_dp_p_normalized": Arm(("--attention=flash_fa2", "--delta=dp_p_normalized")),
    "fa2_delta_corrected": Arm(("--attention=flash_fa2", "--delta=do_o_corrected")),
    "fa2_delta_exact": Arm(("--attention=flash_fa2", "--delta=do_o_exact")),
    "o_fp32_pv_bf16": Arm(("--output=fp32",)),
    "scores_fp32": Arm(("--scores=fp32",)),
    "standard": Arm(("--attention=standard",)),
    "flash_fp32": Arm(("--attention=flash_fp32",), STABLE, "3.1"),
}

if __name__ == "__main__":
    sys.exit(main(__doc__, ARMS, "runs/rates", "isolation.json"))
