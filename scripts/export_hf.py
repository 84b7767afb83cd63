"""Writes a run's weights as a Hugging Face GPT-2 folder: python scripts/export_hf.py RUN OUT

RUN is a run's out_dir (its newest readable checkpoint) or a checkpoint file. OUT then loads with transformers'
GPT2LMHeadModel.from_pretrained, and with --init_from=OUT here, with equal logits.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from anywhere

import checkpoint
from config import ConfigError, from_dict
from hf import save_pretrained
from model import GPTConfig
from scripts.sample import read_checkpoint, sampling_specs, switched
from scripts.targets import check_targets, named


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="export_hf.py", description=__doc__.splitlines()[0])
    parser.add_argument("source", metavar="RUN", help="out_dir or checkpoint file")
    parser.add_argument("out", metavar="OUT", type=named, help="folder to write; must not hold a model yet")
    parser.add_argument("--vocab_size", type=int, default=0,
                        help="keep this many tokens, which drops padding; default: all, since dropping trained rows "
                             "changes every softmax a little")
    args = parser.parse_args(argv)
    try:
        check_targets(folders=(args.out,))
        state = read_checkpoint(args.source)
        if missing := {"model", "model_args", "data", "config", "step"} - set(state):
            raise ConfigError(f"{args.source} has no entry {min(missing)!r}; it is not a checkpoint of train.py")
        specs = sampling_specs(from_dict(state["config"], args.source), "run", switched(state, args.source))
        if capped := [i for i, spec in enumerate(specs) if spec.softcap]:
            raise ConfigError(f"{args.source} has softcap={specs[capped[0]].softcap:g} on the scores of layer "
                              f"{capped[0]}: it cannot be exported, Hugging Face's GPT-2 has no such option")
        config = GPTConfig(**state["model_args"])
        save_pretrained(config, checkpoint.strip_prefixes(state["model"]), args.out, args.vocab_size)
    except (ValueError, OSError, checkpoint.CheckpointError) as error:
        print(f"export_hf.py: error: {error}", file=sys.stderr)
        return 2
    kept, real = args.vocab_size or config.vocab_size, state["data"]["vocab_size"]
    print(f"wrote step {state['step']} of {args.source} to {args.out}: {config.n_layer} layers, {config.n_embd} wide, "
          f"{kept} tokens" + (f", {kept - real} of them padding (--vocab_size={real} drops it)" if kept > real else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
