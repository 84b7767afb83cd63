"""What cures the failing run, and at what price: every remedy that we know of, over the same seeds and batches.

    python scripts/cures.py --dataset data/mini [--seeds 1 2 3 4 5] [--steps 10000] [--arms ARM ...] [--out runs/rates]

Rules of the stabilizer with their constants (Algorithm 3 and variants: attention/spec.py), exacter roundings, and
remedies from elsewhere. Compare the medians with flash_fp32's. How runs are made and counted: rates.py. Writes
cures.json and cures.png into --out, where arms that isolate.py has too are run once for both.
"""

import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from attention.spec import SMALLEST_SHIFT
from scripts.isolate import ARMS as ISOLATION
from scripts.outcomes import STABLE, Arm
from scripts.rates import main

# What `stabilized` is by default is not here again: rule capped, beta 2, epsilon 1e-3. The paper's rule is an arm too.
RULES, BETAS, EPSILONS = ("clamp", "fixed", "unconditional", "lazy_max"), (1.001, 1.1, 8.0, 100.0), (0.0, 1e-2)
EXACTER = ("delta_dp_p", "delta_dp_p_normalized", "delta_corrected", "o_exact_delta", "o_fp32", "output_stochastic",
           "pv_fp32", "scores_fp32", "fa2_o_fp32", "fa2_delta_dp_p", "fa2_delta_dp_p_normalized", "fa2_delta_corrected",
           "fa2_delta_exact")

ARMS = {
    **{name: ISOLATION[name] for name in ("flash_bf16", "flash_fp32", "flash_fa2", "sdpa", "standard")},
    "stabilized": Arm(("--attention=stabilized",), STABLE, "4.2"),
    "stabilizer_paper": Arm(("--attention=stabilized", "--stabilizer=paper", "--shift_cap=inf"), STABLE, "4.2"),
    "stabilizer_paper_bounded": Arm(("--attention=stabilized", "--stabilizer=paper")),
    **{f"stabilizer_{rule}": Arm(("--attention=stabilized", f"--stabilizer={rule}")) for rule in RULES},
    **{f"beta_{beta:g}": Arm(("--attention=stabilized", f"--beta={beta:g}")) for beta in BETAS},
    **{f"epsilon_{epsilon:g}": Arm(("--attention=stabilized", f"--epsilon={epsilon:g}")) for epsilon in EPSILONS},
    # Shifts that many rows share, P < 1 in each (attention/spec.py). BF16 holds the P of fixed_exact and of the default
    # cap, 12.0008; it rounds that of stabilizer_fixed and of shift_cap_12 down in every row; that of the last two is a
    # power of two, which leaves the roundings of P V as they are with P = 1.
    "fixed_exact": Arm(("--attention=stabilized", "--stabilizer=fixed", f"--fixed_shift={SMALLEST_SHIFT!r}")),
    "shift_cap_12": Arm(("--attention=stabilized", "--shift_cap=12")),
    "fixed_ln_2": Arm(("--attention=stabilized", "--stabilizer=fixed", f"--fixed_shift={math.log(2)!r}")),
    "shift_cap_17_ln_2": Arm(("--attention=stabilized", f"--shift_cap={17 * math.log(2)!r}")),
    **{name: ISOLATION[name] for name in EXACTER},
    "qk_norm": Arm(("--qk_norm=True",)),
    "qk_clip_100": Arm(("--qk_clip=100",)),
    "smooth_k": Arm(("--smooth_k=1",)),
    "fa2_smooth_k": ISOLATION["fa2_smooth_k"],
    "sdpa_smooth_k": Arm(("--attention=sdpa", "--smooth_k=1")),
    "gated_attention": Arm(("--gated_attention=True",)),
    "softcap_50": Arm(("--softcap=50",)),
    "logit_softcap_30": Arm(("--logit_softcap=30",)),  # of the final logits; 50 and 30 are Gemma 2's
    "adamw_eps_1e-5": Arm(("--eps=1e-5",)),
    "weight_decay_0.1": Arm(("--weight_decay=0.1",)),
    "standard_fp16": Arm(("--attention=standard", "--dtype=float16")),  # the flash kernels here round to BF16
}

if __name__ == "__main__":
    sys.exit(main(__doc__, ARMS, "runs/rates", "cures.json"))
