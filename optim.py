"""AdamW or Muon + AdamW behind one object, and the learning-rate schedule.

Muon (Jordan et al. 2024) orthogonalises the momentum of each weight matrix of the blocks; embeddings, the tied head
and everything of one dimension stay with AdamW. The update is scaled to AdamW's RMS (Liu et al. 2025, Muon is
Scalable for LLM Training, section 2.2), so that both share one schedule. Under DDP every rank repeats the whole
update from the same averaged gradients, hence with the same result.
"""

import math
import re
from collections import Counter

import torch
from torch import Tensor, nn

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al. 2024: steepest at 0, singular values end in about 0.7..1.2
NS_STEPS = 5


def learning_rate(step: int, config) -> float:
    """The learning rate of optimizer step `step`, counted from 0: nanoGPT's warm-up and cosine.

    Linear over warmup_iters to config.learning_rate, then the cosine that reaches min_lr at lr_decay_iters and stays.
    decay_lr=False stays at config.learning_rate after the warm-up.
    """
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if not config.decay_lr:
        return config.learning_rate
    if step >= config.lr_decay_iters:
        return config.min_lr
    ratio = (step - config.warmup_iters) / (config.lr_decay_iters - config.warmup_iters)
    return config.min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (config.learning_rate - config.min_lr)


def newton_schulz(g: Tensor) -> Tensor:
    """Roughly U V^T of g = U S V^T, for matrices (..., m, n); the result has g's shape and dtype.

    x <- a x + b (x x^T) x + c (x x^T)^2 x on x = g / |g|_F (Jordan et al. 2024). The original computes in BF16; here
    it is FP32 at least, since a study of BF16 rounding cannot have it in the optimizer. FP32 products follow torch's
    setting for TF32.
    """
    a, b, c = NS_COEFFICIENTS
    x = g.to(torch.promote_types(g.dtype, torch.float32)).reshape(-1, *g.shape[-2:])
    if tall := x.shape[-2] > x.shape[-1]:  # the smaller Gram matrix
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).reshape(g.shape).to(g.dtype)


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum, decoupled weight decay and the update scale 0.2 sqrt(max(m, n)).

    A group's `blocks` cuts each of its (rows, n) weights into that many row blocks (m, n), m = rows / blocks, which
    are orthogonalised and scaled separately: the fused QKV weight is one, three or 3 n_head matrices.
    """

    def __init__(self, groups: list[dict], lr: float, momentum: float, weight_decay: float):
        super().__init__(groups, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, blocks=1))
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() != 2 or p.shape[0] % group["blocks"]:
                    raise ValueError(f"Muon cannot cut a parameter of shape {tuple(p.shape)} into {group['blocks']} "
                                     "row blocks: it takes matrices whose row count the blocks divide")

    @torch.no_grad()
    def step(self, skip: Tensor | None = None):
        """skip: a boolean on the device; true leaves weights and state as they are, without this process waiting."""
        skip = torch.zeros((), dtype=torch.bool) if skip is None else skip
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                if "momentum" not in self.state[p]:
                    self.state[p]["momentum"] = torch.zeros_like(p)
                skip, old = skip.to(p.device), self.state[p]["momentum"]
                mean = torch.where(skip, old, old.lerp(p.grad, 1 - momentum))
                old.copy_(mean)
                m, n = p.shape[0] // group["blocks"], p.shape[1]
                direction = newton_schulz(p.grad.lerp(mean, momentum).view(-1, m, n))
                new = p * (1 - lr * group["weight_decay"])
                new.add_(direction.view_as(p), alpha=-lr * 0.2 * math.sqrt(max(m, n)))
                p.copy_(torch.where(skip, p, new))


class Optimizers:
    """Every optimizer of a run behind the interface of one.

    `param_groups` lists all groups, so that a GradScaler and clipping treat the run's gradients as one set: on an
    overflow either all optimizers step or none. Groups carry `name`, `names` and `base` (peak learning rate).
    """

    def __init__(self, optimizers: dict[str, torch.optim.Optimizer], config):
        self.optimizers, self.config = optimizers, config
        self.set_lr(0)

    @property
    def param_groups(self) -> list[dict]:
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    def step(self, skip: Tensor | None = None):
        """skip: a boolean on the device; true leaves everything as it is, decided there, so that nothing waits."""
        for optimizer in self.optimizers.values():
            if isinstance(optimizer, Muon):
                optimizer.step(skip)
            else:  # the fused kernel's own switch, which a GradScaler uses
                optimizer.grad_scale, optimizer.found_inf = None, None if skip is None else skip.float()
                optimizer.step()

    def zero_grad(self, set_to_none: bool = True):
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none)

    def set_lr(self, step: int):
        """Set every group's learning rate for optimizer step `step`.

        Muon's follows the same curve from its own peak: muon_learning_rate * learning_rate(step) / learning_rate.
        """
        lr = learning_rate(step, self.config)
        for group in self.param_groups:
            same = group["base"] == self.config.learning_rate
            group["lr"] = lr if same else group["base"] * (lr / self.config.learning_rate)

    def state_dict(self) -> dict:
        """{optimizer: {parameter name: {key: tensor}}}: tensors and plain values, loadable with weights_only.

        Hyper-parameters are left out: they are the config's, also when a run resumes with changed ones.
        """
        return {kind: {name: dict(optimizer.state[p]) for name, p in self._named(optimizer) if p in optimizer.state}
                for kind, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: dict):
        """Take a copy of the state that `state_dict` gave. Errors: ValueError where it is of other parameters."""
        if set(state) != set(self.optimizers):
            raise ValueError(f"the saved optimizer state is of {' + '.join(state)}, this run's optimizer is "
                             f"{' + '.join(self.optimizers)}; keep `optimizer` when resuming")
        for kind, optimizer in self.optimizers.items():
            named = dict(self._named(optimizer))
            if state[kind] and (odd := set(state[kind]) ^ set(named)):
                raise ValueError(f"the saved {kind} state and the model differ in {len(odd)} parameters, first "
                                 f"{min(odd)}; resume with the options the run was started with")
            for name, values in state[kind].items():
                for key, value in values.items():
                    if value.dim() and value.shape != named[name].shape:
                        raise ValueError(f"the saved {kind} {key} of {name} has shape {tuple(value.shape)}, the "
                                         f"parameter {tuple(named[name].shape)}")
            # Through torch, which knows on which device each optimizer wants its tensors.
            optimizer.load_state_dict({
                "state": {i: {k: v.clone() for k, v in state[kind][name].items()}
                          for i, name in enumerate(named) if name in state[kind]},
                "param_groups": optimizer.state_dict()["param_groups"],
            })

    def describe(self) -> str:
        """One line a group, for the run header: tensors by name, counts, learning rate, weight decay."""
        lines = []
        for group in self.param_groups:
            names = Counter(re.sub(r"\.h\.\d+\.", ".h.*.", name) for name in group["names"])
            details = [f"peak lr {group['base']:g}", f"weight decay {group['weight_decay']:g}"]
            if "momentum" in group:
                details += [f"momentum {group['momentum']:g}", f"row blocks {group['blocks']}",
                            "Newton-Schulz in float32"]
            else:
                details += [f"betas {group['betas'][0]:g}, {group['betas'][1]:g}", f"eps {group['eps']:g}",
                            "fused" if group["fused"] else "not fused"]
            lines.append(f"{group['name']}: {len(group['params'])} tensors, "
                         f"{sum(p.numel() for p in group['params']):,} parameters, {', '.join(details)}: "
                         + ", ".join(name if count == 1 else f"{name} x{count}" for name, count in names.items()))
        return "\n".join(lines)

    @staticmethod
    def _named(optimizer):
        return [pair for g in optimizer.param_groups for pair in zip(g["names"], g["params"], strict=True)]


def build_optimizer(model: nn.Module, config, device_type: str) -> Optimizers:
    """The optimizers that `config` asks for, over the parameters of a bare GPT (before compile and DDP).

    AdamW: weight decay on parameters of two and more dimensions only, as nanoGPT; fused on GPU and CPU, elementwise and
    hence deterministic. Muon: every matrix inside the blocks, the fused QKV weight in its own group, cut as muon_qkv
    says. Errors: ValueError.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    muon, split = [], {"whole": 1, "matrix": 3, "head": 3 * model.config.n_head}
    if config.optimizer == "muon":
        if config.muon_qkv not in split:
            raise ValueError(f"muon_qkv={config.muon_qkv!r} is not one of {', '.join(split)}")
        muon = [name for name, p in named.items() if ".h." in name and p.dim() == 2]
    elif config.optimizer != "adamw":
        raise ValueError(f"optimizer={config.optimizer!r} is not adamw or muon")
    qkv = [name for name in muon if name.endswith("attn.c_attn.weight")]
    rest = [name for name in named if name not in muon]

    def group(name, names, base, **options):
        return dict(name=name, names=names, params=[named[n] for n in names], base=base, lr=base, **options)

    found = [group("adamw, decayed", [n for n in rest if named[n].dim() >= 2], config.learning_rate,
                   weight_decay=config.weight_decay),
             group("adamw, not decayed", [n for n in rest if named[n].dim() < 2], config.learning_rate,
                   weight_decay=0.0)]
    optimizers = {"adamw": torch.optim.AdamW([g for g in found if g["params"]], betas=(config.beta1, config.beta2),
                                             eps=config.eps, fused=device_type in ("cuda", "cpu"))}
    if muon:
        base = config.muon_learning_rate
        optimizers["muon"] = Muon(
            [group(f"muon, qkv by {config.muon_qkv}", qkv, base, blocks=split[config.muon_qkv]),
             group("muon", [n for n in muon if n not in qkv], base)],
            lr=base, momentum=config.muon_momentum, weight_decay=config.muon_weight_decay)
    return Optimizers(optimizers, config)
