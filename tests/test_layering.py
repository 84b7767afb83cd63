"""Who may import whom, and that importing starts nothing: a small project stays readable while this holds."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("attention", "data", "diagnostics", "replay", "scripts")
FILES = sorted([*ROOT.glob("*.py"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))])

# What of ours a module may import: names, each with all below it. The longest matching key counts.
MAY_IMPORT = {
    "attention.rounding": set(),
    "attention.spec": set(),
    "config": set(),
    "determinism": set(),
    "distributed": set(),
    "checkpoint": {"files"},
    "stop": set(),
    "mirror": set(),
    "metrics": {"config", "files", "mirror"},
    "optim": set(),
    "attention.layers": {"attention.spec"},
    "attention.op": {"attention.spec"},
    "attention.standard": {"attention.spec", "attention.rounding", "attention.op"},  # a backend, never another one
    "attention.emulated": {"attention.spec", "attention.rounding", "attention.op"},
    "attention.tiles": set(),
    "attention.kernels": {"attention.spec", "attention.rounding", "attention.tiles"},
    "attention.flash": {"attention.spec", "attention.rounding", "attention.op", "attention.kernels", "attention.tiles"},
    "attention": {"attention"},
    "embedding": set(),
    "loss": {"loss_kernel"},
    "loss_kernel": {"attention.tiles"},
    "model": {"attention", "embedding", "loss"},
    "hf": {"model", "config"},
    "data": {"data"},
    "replay": {"replay", "data", "files"},
    "diagnostics": {"diagnostics", "attention", "files"},
    "failure": set(),
    "files": set(),
    "plan": {"attention", "config", "checkpoint", "data", "metrics", "model", "replay"},
    "settings": {"config"},
    "runinfo": {"attention", "config", "replay", "settings"},
    "keeper": {"checkpoint", "metrics", "replay", "trainer"},
}
EVERYTHING = ("train", "trainer", "steplog", "scripts")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {module_name(path): path for path in FILES}


def imports_of_ours(path: Path) -> set[str]:
    """Our modules that a file imports, in functions too; `from attention import flash` counts as attention.flash."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides which module is meant"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in NAMES else node.module)
    return {name for name in found if name.split(".")[0] in {n.split(".")[0] for n in NAMES}}


def below(name: str, parents) -> bool:
    return any(name == parent or name.startswith(parent + ".") for parent in parents)


@pytest.mark.parametrize("name", NAMES)
def test_imports(name):
    if below(name, EVERYTHING):
        return
    rules = [rule for rule in MAY_IMPORT if below(name, [rule])]
    assert rules, f"{name} is new: say in MAY_IMPORT what it may import"
    allowed = MAY_IMPORT[max(rules, key=len)]
    wrong = {other for other in imports_of_ours(NAMES[name]) if other != name and not below(other, allowed)}
    assert not wrong, f"{name} imports {wrong}, but may import only {allowed or 'nothing of ours'}"


def test_rules_are_of_modules_that_exist():
    assert all(any(below(name, [rule]) for name in NAMES) for rule in MAY_IMPORT)


@pytest.mark.parametrize("name", [name for name in NAMES if "compare" in name or "plot" in name])
def test_plot_scripts_read_files(name):
    """They need metrics.jsonl and the order file: never a model, a run or the loop."""
    seen, todo = set(), {name}
    while todo:
        seen |= todo
        todo = {other for one in todo if one in NAMES for other in imports_of_ours(NAMES[one])} - seen
    assert not [other for other in seen if below(other, ("train", "model", "attention", "checkpoint", "distributed"))]


# Runs in a fresh process: their packages first, then every module of ours under an audit hook.
PROBE = """
import importlib, importlib.util, json, os, random, signal, sys, threading
import numpy, torch, torch.distributed, tqdm, triton, triton.language  # what these start is not ours to judge
loaded, events, modules = set(sys.modules), [], json.loads(sys.argv[1])
before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tobytes(), threading.active_count()
handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
flags = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), dict(os.environ)

def hook(event, args):
    if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        events.append(f"opened {args[0]} to write")
    elif event in ("subprocess.Popen", "os.fork", "socket.connect", "os.mkdir", "os.remove", "os.rename", "os.system"):
        events.append(f"{event} {args}")

sys.addaudithook(hook)
for name, path in modules.items():
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in ("data.text", "data.openwebtext"):
            raise
        spec = importlib.util.spec_from_file_location(name.replace(".", "_"), path)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
now = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tobytes(), threading.active_count()
print(json.dumps({
    "events": events, "cuda": torch.cuda.is_initialized(), "group": torch.distributed.is_initialized(),
    "random": torch.equal(now[0], before[0]) and now[1:3] == before[1:3], "threads": now[3] == before[3],
    "signals": handlers == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)],
    "flags": flags == (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
                       dict(os.environ)),
    "heavy": sorted(set(sys.modules) & {"wandb", "datasets", "tiktoken", "transformers", "matplotlib.pyplot"})}))
"""


def test_importing_starts_nothing(tmp_path):
    """No file, process, thread, connection, CUDA context, process group, signal handler, seed or global flag."""
    modules = {name: str(path) for name, path in NAMES.items() if not name.endswith("__main__")}
    result = subprocess.run([sys.executable, "-B", "-c", PROBE, json.dumps(modules)], cwd=tmp_path, timeout=120,
                            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path),
                                 "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "events": [], "cuda": False, "group": False, "random": True, "threads": True, "signals": True, "flags": True,
        "heavy": []}
    assert len(result.stdout.splitlines()) == 1 and not list(tmp_path.iterdir())
