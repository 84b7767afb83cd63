"""The failure's preconditions in a Hugging Face decoder: python scripts/diagnose_hf.py MODEL --text FILE [--out DIR]

MODEL is a folder or a name on the hub, of the Llama, Qwen2, Qwen3 or GPT-2 classes. Reads the text once and writes, as
figures 8 and 9 of arXiv 2510.04212 do for Llama-3.1-8B: how alike the matrices (PK)[T]^T X[T] are from token to token,
by layer and head, and every row of the scores that has two or more maxima, by layer, head and query. Beside these, by
layer and key head: how many times as long the mean key is as the root mean square of what keys differ from it by.
preconditions.json has all numbers, preconditions.md a summary, figure8.png and figure9.png the pictures. Nothing is
trained, and that the preconditions hold does not say that the model would fail. Needs transformers.

The mean key adds the same to all scores of a row, so softmax does not see it, and delta's rounding error pushes queries
along it: in this repository's small run in the layer where it is longest (docs/diagnosis.md has the numbers).

X is the input of the query projection, K the keys and P the softmax of the scores, which are rounded to BF16 as
flash_bf16 rounds them, with the model's own positions and norms of queries and keys. (PK)[T] is then taken back through
positions and norm of the query to the output of W_Q, so that in these models too the error of its gradient is
alpha sum_T (delta_lp - delta_hp)[T] (PK)[T]^T X[T]; in GPT-2 that changes nothing.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from anywhere

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from config import ConfigError
from diagnostics.preconditions import attention_weighted_keys, bf16_scores, closest_neighbours, similarity, tied_rows
from diagnostics.preconditions_page import draw, page
from diagnostics.probes import key_mean
from files import write_text
from metrics import to_json
from scripts.targets import check_targets, named

# model_type: where its attention modules are, and which projection makes the queries (in its first columns).
CLASSES = {"llama": ("model.layers", "self_attn", "q_proj"), "qwen2": ("model.layers", "self_attn", "q_proj"),
           "qwen3": ("model.layers", "self_attn", "q_proj"), "gpt2": ("transformer.h", "attn", "c_attn")}
SHORTEST = 8  # tokens: fewer have no rows to speak of
EXAMPLES = 6  # rows that figure 9 shows


def load_model(name: str, tokenizer: str | None, dtype: torch.dtype, device: str):
    """(model, tokenizer) in evaluation mode. Errors: ConfigError."""
    try:
        import transformers
    except ImportError:
        raise ConfigError("diagnose_hf.py needs transformers: pip install transformers") from None
    try:
        config = transformers.AutoConfig.from_pretrained(name)
    except Exception as error:  # no folder, no network, no such model: each has its own class
        raise ConfigError(f"{name} is no model that can be found ({_first(error)}); give a folder with a config.json, "
                          "or a name on the hub") from None
    if config.model_type not in CLASSES:
        raise ConfigError(f"{name} is of model_type {config.model_type!r}; known are {', '.join(CLASSES)}")
    try:
        coder = transformers.AutoTokenizer.from_pretrained(tokenizer or name)
    except Exception as error:
        raise ConfigError(f"{tokenizer or name} has no tokenizer that can be loaded ({_first(error)}); name one with "
                          "--tokenizer") from None
    if not coder.get_vocab().keys() - set(coder.all_special_tokens):  # transformers 5 makes an empty one of no files
        files = ", ".join(sorted({"tokenizer.json", *coder.vocab_files_names.values()}))
        raise ConfigError(f"{tokenizer or name} has no tokenizer (none of {files}); name one that has it with "
                          "--tokenizer")
    transformers.AttentionInterface.register("recorded", _attention)
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="recorded")
    except Exception as error:
        raise ConfigError(f"the weights of {name} cannot be loaded ({_first(error)})") from None
    return model.to(device).eval(), coder


def _first(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[0]}"


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask, scaling: float, **kwargs):
    """Causal attention as transformers calls it; leaves q (1, H, T, D), k (1, G, T, D) and the scaling of the scores in
    module.recorded."""
    T, window = query.shape[2], kwargs.get("sliding_window")
    if window and window < T:
        raise ConfigError(f"layer {module.layer_idx} sees a window of {window} tokens; use --tokens={window} or less")
    module.recorded = query, key, scaling
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def layers(model: nn.Module, ids: Tensor):
    """Yields (q (H, T, D), k (G, T, D), x (T, C), scaling, back) of each layer for token ids (1, T); back takes what
    belongs to q, (H, T, D), to the output of W_Q, by the transposed Jacobian of what lies between."""
    path, name, projection = CLASSES[model.config.model_type]
    modules = [getattr(block, name) for block in model.get_submodule(path)]
    calls: dict[nn.Module, tuple] = {}
    hooks = [m.register_forward_pre_hook(lambda m, args, kwargs: calls.__setitem__(m, (args, kwargs)), with_kwargs=True)
             for m in modules]
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for module in modules:
        args, kwargs = calls.pop(module)
        x = args[0] if args else kwargs["hidden_states"]
        q, k, scaling = module.recorded
        leaf, smooth = _graph(module, projection, args, kwargs)

        def back(pk: Tensor, leaf=leaf, smooth=smooth) -> Tensor:
            grad, = torch.autograd.grad(smooth, leaf, pk[None].to(smooth.dtype), retain_graph=True)
            H, T, D = pk.shape
            return grad[0, :, :H * D].reshape(T, H, D).transpose(0, 1).double()

        yield q[0].detach(), k[0].detach(), x[0].detach(), scaling, back


def _graph(module: nn.Module, projection: str, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    """(output of the query projection, q) of one attention module in FP32, the second a function of the first for
    autograd: in the model's own dtype the way back would round, and cosines near 1 would show it."""
    dtype, leaf = next(module.parameters()).dtype, []

    def cut(_module, _args, output):
        leaf.append(output.detach().requires_grad_())
        return leaf[0]

    def wide(y):
        return y.float() if torch.is_tensor(y) and y.is_floating_point() else y

    hook = getattr(module, projection).register_forward_hook(cut)
    try:
        with torch.enable_grad():
            module.float()(*tree_map(wide, args), **tree_map(wide, kwargs))
    finally:
        hook.remove()
        module.to(dtype)  # FP32 held every value of it
    return leaf[0], module.recorded[0]


def examine(model: nn.Module, ids: Tensor, epsilon: float) -> tuple[dict, dict]:
    """(numbers for JSON, tensors for the figures) for token ids (1, T). Errors: ConfigError where a layer is not
    finite."""
    found = {"similarity": [], "counts": [], "rows": [], "key_mean": []}
    shown = {"best": -1.0, "examples": []}
    for i, (q, k, x, scaling, back) in enumerate(layers(model, ids)):
        if not all(y.isfinite().all() for y in (q, k, x)):
            raise ConfigError(f"layer {i}'s queries, keys or input are not finite in {q.dtype}; use --dtype float32")
        s, x = bf16_scores(q, k, scaling), x.double()
        pk = back(attention_weighted_keys(s, k))
        alike, ties = similarity(pk, x), tied_rows(s, epsilon)
        found["similarity"].append(alike)
        found["counts"].append(ties["counts"])
        found["key_mean"].append(key_mean(k).tolist())
        found["rows"] += [[i, *row] for row in ties["rows"]]
        best = max(range(len(pk)), key=lambda h, a=alike: abs(a["matrices_next"][h]))
        if abs(alike["matrices_next"][best]) > shown["best"]:
            token = closest_neighbours(pk[best], x)
            shown |= {"best": abs(alike["matrices_next"][best]), "layer": i, "head": best, "token": token,
                      "pk": pk[best, token:token + 2].cpu(), "x": x[token:token + 2].cpu()}
        few = sorted(ties["rows"], key=lambda row: -len(row[3]))[:EXAMPLES]
        shown["examples"] += [(i, h, t, len(keys), torch.exp(s[h, t, :t + 1] - s[h, t].max()).cpu())
                              for h, t, _, keys in few]
    shown["examples"] = sorted(shown["examples"], key=lambda one: -one[3])[:EXAMPLES]
    found |= {"heads": len(q), "key_heads": len(k), "head_size": q.shape[-1], "layers": i + 1}
    found["figure8"] = _figure8_numbers(shown)
    return found, shown


def _figure8_numbers(shown: dict) -> dict:
    """Two tokens' matrices: their cosine, and that of the three columns whose input features are largest in both."""
    pk, x = shown["pk"], shown["x"]
    a, b = (torch.outer(pk[i], x[i]) for i in (0, 1))
    columns = x.abs().prod(0).topk(min(3, x.shape[1])).indices.tolist()
    cosine = nn.functional.cosine_similarity
    return {"layer": shown["layer"], "head": shown["head"], "tokens": [shown["token"], shown["token"] + 1],
            "matrix": cosine(a.flatten(), b.flatten(), 0).item(),
            "columns": {j: cosine(a[:, j], b[:, j], 0).item() for j in columns}}


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 with one sentence for what a user can change."""
    parser = argparse.ArgumentParser(prog="diagnose_hf.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder, or a name on the hub")
    parser.add_argument("--text", metavar="FILE", required=True, help="UTF-8 text to read")
    parser.add_argument("--tokens", type=int, default=512, help="read at most this many; default 512")
    parser.add_argument("--tokenizer", metavar="NAME", help="where MODEL has none")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16", help="of the model")
    parser.add_argument("--epsilon", type=float, default=1e-3, help="scores this close to the maximum count as one")
    parser.add_argument("--out", metavar="DIR", type=named, default=Path("preconditions"),
                        help="default: preconditions")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu",
                        choices=("cpu", "cuda"))
    args = parser.parse_args(argv)
    try:
        if args.tokens < SHORTEST:
            raise ConfigError(f"--tokens={args.tokens} must be at least {SHORTEST}")
        if not 0 <= args.epsilon < float("inf"):
            raise ConfigError(f"--epsilon={args.epsilon} must be finite and not negative")
        if args.device.startswith("cuda") and not torch.cuda.is_available():
            raise ConfigError(f"--device={args.device}, but torch sees no GPU; use --device=cpu")
        check_targets(folders=(args.out,))
        text = Path(args.text).read_text(encoding="utf-8")
        model, coder = load_model(args.model, args.tokenizer, getattr(torch, args.dtype), args.device)
        most = min(args.tokens, getattr(model.config, "max_position_embeddings", args.tokens))
        ids = coder(text, truncation=True, max_length=most)["input_ids"]
        if len(ids) < SHORTEST:
            raise ConfigError(f"{args.text} has {len(ids)} tokens, and fewer than {SHORTEST} say nothing; give a "
                              "longer text")
        if max(ids) >= model.config.vocab_size:
            raise ConfigError(f"the tokenizer's id {max(ids)} is not among the {model.config.vocab_size} of "
                              f"{args.model}; name its own with --tokenizer")
        found, shown = examine(model, torch.tensor([ids], device=args.device), args.epsilon)
        found |= {"model": args.model, "text": Path(args.text).name, "tokens": len(ids), "ids": ids,
                  "dtype": args.dtype, "pieces": coder.convert_ids_to_tokens(ids), "epsilon": args.epsilon}
        write_text(args.out / "preconditions.json", to_json(found) + "\n")
        draw(found, shown, args.out)
        write_text(args.out / "preconditions.md", page(found))
    except (ValueError, OSError) as error:
        print(f"diagnose_hf.py: error: {error}", file=sys.stderr)
        return 2
    print(page(found).split("\n\nColumn j")[0])
    print(f"\nwritten to {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
