"""GPT-2 with nanoGPT's parameter names and initialisation; a block gets its attention as a callable.

The model knows no attention backend: `attend[i](q, k, v, stats=False)` is layer i's attention, usually an
`attention.AttentionLayer`. Options for experiments are off by default, each as its paper defines it:

    qk_norm          RMSNorm over each head's q and k before the scores, one learnable scale of D values for q and one
                     for k, shared by the heads (Qwen3 technical report, section 2; the idea is Henry et al. 2020)
    qk_clip          tau: after the optimizer step, W_q and W_k of a head whose largest score S in the step exceeded
                     tau shrink by sqrt(tau / S) each (MuonClip, Kimi K2 technical report, section 2.1, alpha = 1/2)
    gated_attention  O * sigmoid(X W_g), elementwise and so head-specific, X the layer's normalised input (Qiu et al.
                     2025, Gated Attention for Large Language Models, position G1)
    logit_softcap    c: final logits become c * tanh(logits / c) (Gemma 2, section 2). A soft cap on the attention
                     scores is a switch of the attention spec, not of the model

Dropout acts on the embeddings and on what each branch adds to the residual stream, not on attention probabilities:
backends differ in how they would draw it, and a replay must not.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from embedding import embedding
from loss import linear_cross_entropy

GELU = {"exact": "none", "tanh": "tanh"}  # our name: torch's


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. Errors: ValueError that names the field, its value and what would be accepted."""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    vocab_size: int = 50304  # GPT-2's 50257 padded to a multiple of 64; ids past the tokenizer's are never seen
    dropout: float = 0.0
    bias: bool = False  # in the linear layers and LayerNorms
    gelu: str = "exact"  # nanoGPT's; "tanh" is what OpenAI's GPT-2 weights were trained with
    qk_norm: bool = False
    qk_clip: float = 0.0  # tau; 0 is off
    gated_attention: bool = False
    logit_softcap: float = 0.0  # 0 is off
    loss_chunk: int = 0  # tokens whose logits exist at a time, in training; 0 is all

    def __post_init__(self):
        for name in ("n_layer", "n_head", "n_embd", "block_size", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} must lie in [0, 1)")
        if self.gelu not in GELU:
            raise ValueError(f"gelu={self.gelu!r} is not one of {', '.join(GELU)}")
        for name in ("qk_clip", "logit_softcap", "loss_chunk"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be positive, or 0 for off")
        if self.qk_norm and self.qk_clip:
            raise ValueError(f"qk_clip={self.qk_clip} with qk_norm: the normalisation undoes any rescaling of W_q "
                             "and W_k; choose one of them")


class Attention(nn.Module):
    """Projections around `attend`. x: (B, T, C) to (B, T, C)."""

    def __init__(self, config: GPTConfig, attend: Callable):
        super().__init__()
        self.n_head, self.records_max = config.n_head, config.qk_clip > 0
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.q_norm = nn.RMSNorm(config.n_embd // config.n_head, eps=1e-6) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(config.n_embd // config.n_head, eps=1e-6) if config.qk_norm else None
        self.c_gate = nn.Linear(config.n_embd, config.n_embd, bias=False) if config.gated_attention else None
        self.dropout = nn.Dropout(config.dropout)
        self.attend = attend
        if self.records_max:  # largest score per head since the last clip; derived, so no part of a checkpoint
            self.register_buffer("max_score", torch.full((config.n_head,), -math.inf), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        # Three (B, H, T, D) views of one (B, T, 3C) tensor.
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)
        if self.q_norm is not None:  # in FP32, so that the scores' rounding points stay the backend's alone
            q, k = self.q_norm(q.float()).to(v.dtype), self.k_norm(k.float()).to(v.dtype)
        if self.records_max and self.training:
            y, stats = self.attend(q, k, v, stats=True, counted=0)
            with torch.no_grad():
                self.max_score.copy_(torch.maximum(self.max_score, stats.row_max.float().amax((0, 2))))
        else:
            y = self.attend(q, k, v)
        y = y.transpose(1, 2).reshape(B, T, C)
        if self.c_gate is not None:
            y = y * torch.sigmoid(self.c_gate(x))
        return self.dropout(self.c_proj(y))  # an O kept in FP32 is cast here, by autocast, and nowhere before


class MLP(nn.Module):
    """x: (B, T, C) to (B, T, C) through 4C."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.approximate = GELU[config.gelu]

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate=self.approximate)))


class Block(nn.Module):
    """Pre-norm residual block: x + attention(ln_1(x)), then x + mlp(ln_2(x))."""

    def __init__(self, config: GPTConfig, attend: Callable):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config, attend)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019). attend: one callable a layer, see the module's docstring.

    The weights follow from the CPU generator's state alone: the same on every device, and the shared parameters
    are the same with and without an option, so that two arms of an experiment start from one point.
    Errors: ValueError where `attend` has another length than config.n_layer.
    """

    def __init__(self, config: GPTConfig, attend: Sequence[Callable]):
        super().__init__()
        if len(attend) != config.n_layer:
            raise ValueError(f"{len(attend)} attention layers for a model with n_layer={config.n_layer}; "
                             "give one callable a layer")
        self.config = config
        seed = int(torch.randint(2**62, (), device="cpu"))
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(config.vocab_size, config.n_embd),
            wpe=nn.Embedding(config.block_size, config.n_embd),
            drop=nn.Dropout(config.dropout),
            h=nn.ModuleList(Block(config, one) for one in attend),
            ln_f=nn.LayerNorm(config.n_embd, bias=config.bias),
        ))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight  # tied (Press and Wolf 2017)
        self._initialise(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator):
        """As nanoGPT: matrices of std 0.02, residual projections of 0.02 / sqrt(2 n_layer), biases 0, norms 1."""
        for name, p in sorted(self.named_parameters(), key=lambda item: "c_gate" in item[0]):  # options draw last
            if p.dim() >= 2:
                std = 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02
                p.copy_(torch.empty(p.shape, device="cpu").normal_(0, std, generator=generator))
            else:
                p.fill_(0.0 if name.endswith("bias") else 1.0)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """idx, targets: (B, T) int64, T <= block_size; targets of -1 are left out of the mean.

        Returns (logits (B, T, V), FP32 mean cross-entropy in nats); without targets (logits (B, 1, V), None) of the
        last position alone. With targets and loss_chunk the logits are None: they never exist together.
        Errors: ValueError for a T past block_size.
        """
        T = idx.shape[1]
        if T > self.config.block_size:
            raise ValueError(f"a sequence of {T} tokens exceeds block_size={self.config.block_size}; crop it first")
        x = self.transformer.drop(embedding(idx, self.transformer.wte.weight) + self.transformer.wpe.weight[:T])
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x if targets is not None else x[:, -1:])
        cap, chunk = self.config.logit_softcap, self.config.loss_chunk
        if targets is not None and chunk:
            return None, linear_cross_entropy(x, self.lm_head.weight, targets, chunk, cap)
        logits = self.lm_head(x)
        if cap:
            logits = cap * torch.tanh(logits.float() / cap)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def apply_qk_clip(self, reduce_max: Callable[[Tensor], Tensor] = lambda x: x,
                      skip: Tensor | None = None) -> Tensor:
        """Rescale W_q and W_k of the heads that scored above tau; call it after every optimizer step.

        reduce_max: maximum over ranks of an FP32 tensor, which all ranks call together. DDP must be built with
        broadcast_buffers=False, or rank 0's maxima replace the others' before they are read. skip: a boolean, on the
        device where this process need not wait for it; true for a step that was left out, which clips nothing.
        Returns (n_layer, n_head), the largest score of each head since the last call (-inf: none recorded), and
        forgets it. A score that is not finite rescales nothing: halting is the training loop's decision.
        Source: Kimi K2, equation for QK-Clip with gamma = min(1, tau / S_max), alpha = 1/2; biases scale along.
        """
        if not (tau := self.config.qk_clip):
            raise ValueError("apply_qk_clip needs a model built with qk_clip > 0, which records the largest scores")
        layers = [block.attn for block in self.transformer.h]
        scores = reduce_max(torch.stack([attn.max_score for attn in layers]))
        clips = (scores > tau) & scores.isfinite()
        if skip is not None:
            clips &= ~skip
        scales = torch.where(clips, (tau / scores).sqrt(), 1.0)
        for attn, scale in zip(layers, scales, strict=True):
            for p in (attn.c_attn.weight, attn.c_attn.bias):
                if p is not None:  # rows are ordered q, k, v; then head; then feature
                    p.view(3, attn.n_head, -1)[:2].mul_(scale[:, None])
            attn.max_score.fill_(-math.inf)
        return scores

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
                 n_tokens: int | None = None, generator: torch.Generator | None = None) -> Tensor:
        """Continue idx (B, T), T >= 1, to (B, T + max_new_tokens), one sampled token at a time.

        temperature 0 takes the likeliest token; top_k keeps the k likeliest; n_tokens is the tokenizer's vocabulary,
        past which lies padding that must not be drawn. The caller chooses eval mode. Errors: ValueError.
        """
        if not 0 <= temperature < math.inf:
            raise ValueError(f"temperature={temperature} must be finite and not negative (0 is greedy)")
        if top_k is not None and top_k < 1:
            raise ValueError(f"top_k={top_k} must be at least 1")
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size:])[0][:, -1, :n_tokens].float()
            if top_k is not None:
                smallest_kept = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < smallest_kept, -math.inf)
            if temperature == 0:
                token = logits.argmax(-1, keepdim=True)
            else:
                token = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
            idx = torch.cat((idx, token), dim=1)
        return idx

    def num_params(self) -> int:
        """Parameters; as in nanoGPT, position embeddings do not count, token embeddings (tied) do."""
        return sum(p.numel() for p in self.parameters()) - self.transformer.wpe.weight.numel()

    def flops_per_token(self) -> int:
        """Training FLOPs a token at full block_size: 6 N + 12 L C T (PaLM, Appendix B; N as num_params()).

        6 N is forward and backward through the weights, 12 L C T the two products of attention, counted without
        the saving of the causal mask.
        """
        c = self.config
        return 6 * self.num_params() + 12 * c.n_layer * c.n_embd * c.block_size
