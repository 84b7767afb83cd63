"""Hugging Face GPT-2 weights in and out, without transformers: config.json and one file of tensors.

Three things differ from ours. Hugging Face stores the four matrices of a block as "Conv1D", (inputs, outputs); its
GPT-2 always has biases; and it names the tanh approximation of GELU "gelu_new". Dropout, block_size and the padding of
the vocabulary are free: they do not change what the weights compute on real tokens.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from config import ConfigError
from model import GPT, GPTConfig

HUB = {"gpt2": "openai-community/gpt2", "gpt2-medium": "openai-community/gpt2-medium"}
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
GELU_IN = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}
GELU_OUT = {"tanh": "gelu_new", "exact": "gelu"}
# What our model computes; a folder that asks for anything else is refused. Absent keys have these values.
FIXED = {"model_type": "gpt2", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True,
         "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "tie_word_embeddings": True}
CONV1D = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")


def find_folder(source: str) -> Path:
    """The local folder behind "gpt2", "gpt2-medium" (downloaded to the Hugging Face cache) or a path. ConfigError."""
    if source not in HUB:
        if not (Path(source) / "config.json").is_file():
            raise ConfigError(f"init_from={source} is neither scratch, resume, a checkpoint (*.pt), {', '.join(HUB)} "
                              f"nor a folder with a config.json and one of {', '.join(WEIGHTS)}")
        return Path(source)
    try:
        from huggingface_hub import snapshot_download

        # Either file will do, and the repository holds the weights in six other formats besides.
        return Path(snapshot_download(HUB[source], allow_patterns=["config.json", "model.safetensors"]))
    except Exception as error:  # no package, no network, no such cache entry: the way out is the same
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ConfigError(f"init_from={source}: {HUB[source]} is not in the Hugging Face cache and could not be "
                          f"downloaded ({type(error).__name__}: {reason}); on a machine with a network run `hf "
                          f"download {HUB[source]} config.json model.safetensors --local-dir DIR`, copy DIR here and "
                          "use --init_from=DIR") from None


def read_pretrained(source: str) -> tuple[GPTConfig, dict[str, Tensor]]:
    """Hugging Face weights as (our config, our state dict without the tied lm_head). source: as `find_folder`.

    Errors: ConfigError for a folder that is incomplete, or that asks for a computation our model does not do.
    """
    folder = find_folder(source)
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}/config.json cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{folder}/config.json is no GPT-2 config")
    for key, ours in FIXED.items():
        if raw.get(key, ours) != ours:
            raise ConfigError(f"{folder}/config.json has {key}={raw[key]!r}; only {ours!r} can be loaded")
    if raw.get("activation_function", "gelu_new") not in GELU_IN:
        raise ConfigError(f"{folder}/config.json has activation_function={raw['activation_function']!r}; only "
                          f"{', '.join(GELU_IN)} can be loaded")
    try:
        config = GPTConfig(n_layer=raw["n_layer"], n_head=raw["n_head"], n_embd=raw["n_embd"],
                           block_size=raw.get("n_positions", 1024), vocab_size=raw.get("vocab_size", 50257), bias=True,
                           gelu=GELU_IN[raw.get("activation_function", "gelu_new")])
    except KeyError as error:
        raise ConfigError(f"{folder}/config.json lacks {error}; it is no GPT-2 config") from None
    except TypeError as error:  # a size that is no number
        raise ConfigError(f"{folder}/config.json has a size of the wrong type ({error})") from None
    if raw.get("n_inner") not in (None, 4 * config.n_embd):
        raise ConfigError(f"{folder}/config.json has n_inner={raw['n_inner']}; only 4 * n_embd can be loaded")

    weights = {}
    for name, tensor in _read_tensors(folder).items():
        name = "transformer." + name.removeprefix("transformer.")
        if name.endswith((".attn.bias", ".attn.masked_bias", "lm_head.weight")):  # causal masks, and the tied copy
            continue
        weights[name] = tensor.t().contiguous() if name.endswith(CONV1D) else tensor
    return config, weights


def load_pretrained(model: GPT, source: str) -> None:
    """Copy Hugging Face GPT-2 weights into a model of the same shape. source: as `find_folder`.

    A shorter block_size drops the last positions. Rows of a larger vocabulary become the mean of the real ones: such a
    token's logit is the mean logit, so by Jensen the padding adds at most log(1 + padding / real) to any loss (1e-3
    for 50304), where a zero row would beat most real logits of GPT-2, which lie far below 0.
    Errors: ConfigError that names every field of the run's config that the weights contradict.
    """
    theirs, weights = read_pretrained(source)
    ours = model.config
    wanted = [f"--{name}={getattr(theirs, name)}"
              for name in ("n_layer", "n_head", "n_embd", "bias", "gelu", "qk_norm", "gated_attention", "logit_softcap")
              if getattr(theirs, name) != getattr(ours, name)]
    if ours.block_size > theirs.block_size:
        wanted.append(f"--block_size={theirs.block_size} (or less)")
    if ours.vocab_size < theirs.vocab_size:
        wanted.append(f"--vocab_size={theirs.vocab_size} (or more)")
    if wanted:
        raise ConfigError(f"init_from={source} does not fit this model; use {' '.join(wanted)}")
    state = dict(model.named_parameters())
    if odd := set(state) ^ set(weights):
        raise ConfigError(f"init_from={source}: the weights lack or add {len(odd)} tensors, first {min(odd)}")
    with torch.no_grad():
        for name, p in state.items():
            value = weights[name].to(p.dtype)
            if name == "transformer.wpe.weight":
                value = value[: ours.block_size]
            elif name == "transformer.wte.weight":
                p[len(value):] = value.mean(0)
                p = p[: len(value)]
            if value.shape != p.shape:
                raise ConfigError(f"init_from={source}: {name} has shape {tuple(value.shape)}, the model's is "
                                  f"{tuple(p.shape)}")
            p.copy_(value)


def save_pretrained(config: GPTConfig, state: dict[str, Tensor], folder: str | Path, vocab_size: int = 0) -> None:
    """Write config.json and model.safetensors that transformers' GPT2LMHeadModel loads with equal logits.

    state: the model's state dict. vocab_size: keep that many tokens; 0 keeps the padding, since dropping trained rows
    changes every softmax a little. Errors: ConfigError for options that GPT-2 does not have, and for a folder that
    already holds a model.
    """
    on = [name for name in ("qk_norm", "gated_attention", "logit_softcap") if getattr(config, name)]
    if on:
        raise ConfigError(f"a model with {', '.join(on)} cannot be exported: Hugging Face's GPT-2 has no such option")
    vocab_size = vocab_size or config.vocab_size
    if not 1 <= vocab_size <= config.vocab_size:
        raise ConfigError(f"vocab_size={vocab_size} is outside 1..{config.vocab_size}, the model's")
    folder = Path(folder)
    if (folder / "config.json").exists():
        raise ConfigError(f"{folder} already holds a config.json; choose another folder")
    tensors = {}
    for name, tensor in state.items():
        if name == "lm_head.weight":
            continue  # tied; transformers ties it again
        if name == "transformer.wte.weight":
            tensor = tensor[:vocab_size]
        tensors[name] = tensor.detach().cpu().t() if name.endswith(CONV1D) else tensor.detach().cpu()
        if not config.bias and name.endswith(".weight") and not name.endswith(("wte.weight", "wpe.weight")):
            tensors[name.removesuffix("weight") + "bias"] = tensor.new_zeros(tensor.shape[0], device="cpu")
    text = {**FIXED, "architectures": ["GPT2LMHeadModel"], "activation_function": GELU_OUT[config.gelu],
            "n_layer": config.n_layer, "n_head": config.n_head, "n_embd": config.n_embd,
            "n_positions": config.block_size, "vocab_size": vocab_size, "initializer_range": 0.02,
            "resid_pdrop": config.dropout, "embd_pdrop": config.dropout, "attn_pdrop": 0.0, "use_cache": True,
            "torch_dtype": "float32"}
    if vocab_size >= 50257:  # GPT-2's tokenizer: one token both starts and ends a text
        text |= {"bos_token_id": 50256, "eos_token_id": 50256}
    else:
        text |= {"bos_token_id": None, "eos_token_id": None}
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / WEIGHTS[0], metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(text, indent=2) + "\n", encoding="utf-8")  # last: marks it complete


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise ConfigError(f"{folder} has a config.json but neither {' nor '.join(WEIGHTS)}")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # each format has its own exceptions; none of them is worth telling apart
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}: {error})") from None
