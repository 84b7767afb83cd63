"""Continues a prompt with a trained model: python scripts/sample.py RUN --prompt "The " --temperature 0.8

RUN is a run's out_dir (its newest readable checkpoint), a checkpoint file, gpt2, gpt2-medium or a folder of Hugging
Face GPT-2 weights. All arithmetic is FP32, also the attention's unless --attention asks for another backend.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from anywhere

import torch

import checkpoint
from attention import AttentionLayer, AttentionSpec, specs_of
from attention.spec import from_key
from config import Config, ConfigError, from_dict
from data.tokenizer import tokenizer
from hf import HUB, load_pretrained, read_pretrained
from model import GPT, GPTConfig
from replay.switches import from_plain


def read_checkpoint(source: str) -> dict:
    """The checkpoint at a file or the newest readable one of an out_dir, on the CPU. Errors: CheckpointError."""
    return checkpoint.load(source) if Path(source).is_file() else checkpoint.load_latest(source)


def sampling_specs(config, attention: str, switches=()) -> list[AttentionSpec]:
    """One spec a layer: the run's own for attention="run", after these switches of its layers, else this backend with
    the run's soft cap on the scores."""
    specs = specs_of(config)
    for switch in switches:
        specs[switch.layer] = from_key(switch.spec)
    return specs if attention == "run" else [AttentionSpec(attention, softcap=spec.softcap) for spec in specs]


def switched(state: dict, source: str) -> list:
    """What a checkpoint's layers had been switched to by its step. Errors: OrderError."""
    return [s for s in from_plain(state.get("switches", []), source) if s.step <= state["step"]]


def load_model(source: str, attention: str = "flash_fp32") -> tuple[GPT, str, int]:
    """(model in evaluation mode on the CPU, tokenizer's name, tokens that the tokenizer knows). Errors: ValueError,
    CheckpointError."""
    if source in HUB or (Path(source) / "config.json").is_file():
        config, _ = read_pretrained(source)
        backend = "flash_fp32" if attention == "run" else attention
        model = GPT(config, [AttentionLayer(AttentionSpec(backend), i) for i in range(config.n_layer)])
        load_pretrained(model, source)
        return model.eval(), "gpt2", config.vocab_size
    state = read_checkpoint(source)
    try:
        specs = sampling_specs(from_dict(state["config"], source), attention, switched(state, source))
        config = GPTConfig(**state["model_args"])
        data, weights = state["data"], checkpoint.strip_prefixes(state["model"])
    except KeyError as error:
        raise ConfigError(f"{source} has no entry {error}; it is not a checkpoint of train.py") from None
    model = GPT(config, [AttentionLayer(spec, i) for i, spec in enumerate(specs)])
    model.load_state_dict(weights)
    return model.eval(), data["tokenizer"], data["vocab_size"]


def sample(source: str, prompt: str, count: int, max_new_tokens: int, temperature: float, top_k: int, seed: int,
           device: str, attention: str = "flash_fp32", gpt2_ranks: str | None = None) -> list[str]:
    """`count` continuations of the prompt, prompt included; an empty prompt starts a new document.

    top_k 0 draws from the whole vocabulary. Equal seeds give equal texts on one device. Errors: ValueError,
    CheckpointError.
    """
    model, name, n_tokens = load_model(source, attention)
    coder = tokenizer(name, None if name == "bytes" else gpt2_ranks)
    if coder.vocab_size > n_tokens:
        raise ConfigError(f"{source} has {n_tokens} tokens, but its tokenizer would be {name} with {coder.vocab_size}; "
                          "a Hugging Face folder names no tokenizer: sample from the run that it was exported from")
    ids = [int(i) for i in coder.encode(prompt)] or [coder.end_of_text]
    if max(ids) >= n_tokens:
        raise ConfigError(f"the prompt's token {max(ids)} is not among the {n_tokens} that {source} was trained on")
    generator = torch.Generator(device).manual_seed(seed)
    start = torch.tensor([ids] * count, device=device)
    out = model.to(device).generate(start, max_new_tokens, temperature, top_k or None, n_tokens, generator)
    return [coder.decode(row) for row in out.tolist()]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sample.py", description=__doc__.splitlines()[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("source", metavar="RUN", help="out_dir, checkpoint file, gpt2, gpt2-medium or a folder")
    parser.add_argument("--prompt", default="\n", help="text to continue; empty starts a new document")
    parser.add_argument("--num_samples", type=int, default=1, help="texts to draw")
    parser.add_argument("--max_new_tokens", type=int, default=300, help="tokens after the prompt")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token")
    parser.add_argument("--top_k", type=int, default=200, help="draw among the k likeliest; 0 is all")
    parser.add_argument("--seed", type=int, default=1337, help="of the draws")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        choices=("cpu", "cuda"))
    parser.add_argument("--attention", default="flash_fp32", help="a backend, or run for the run's own")
    parser.add_argument("--gpt2_ranks", metavar="FILE", help="merge ranks in tiktoken's format, instead of a download")
    args = parser.parse_args(argv)
    try:
        for name in ("num_samples", "max_new_tokens"):
            if getattr(args, name) < 1:
                raise ConfigError(f"--{name}={getattr(args, name)} must be at least 1")
        Config(seed=args.seed)  # its bounds
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"--device={args.device}, but torch sees no GPU; use --device=cpu")
        texts = sample(args.source, args.prompt, args.num_samples, args.max_new_tokens, args.temperature, args.top_k,
                       args.seed, args.device, args.attention, args.gpt2_ranks)
    except (ValueError, checkpoint.CheckpointError) as error:
        print(f"sample.py: error: {error}", file=sys.stderr)
        return 2
    print(("\n" + "-" * 20 + "\n").join(texts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
