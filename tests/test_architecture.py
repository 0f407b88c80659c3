"""The structure that CONTRIBUTING.md describes, held by the syntax tree of every source file."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kernels", "reporting", "scripts")
SOURCES = sorted(
    [*ROOT.glob("*.py"), *(path for name in PACKAGES for path in ROOT.glob(f"{name}/*.py"))]
)
OURS = {path.stem for path in ROOT.glob("*.py")} | set(PACKAGES)

# From bottom to top: a module imports only from the lines below it, or from its own line.
LAYERS = [
    {
        "config",
        "command",
        "chat_render",
        "stats",
        "progress",
        "compiled_step",
        "strict_json",
        "eval_config",
        "generate_config",
        "model_config",
        "plain_files",
    },
    {"programs", "quality", "checkpoint_fields"},
    {"durable", "kv_formats", "chat_template", "tokenizer_base"},
    {"kernels", "tokenizer_gguf", "tokenizer", "tokenizer_files", "tokenizer_trial", "results"},
    {"derived"},
    {"summary"},
    {"reporting"},
    {"rope"},
    {"model"},
    {"kv_cache", "machine", "stored_tensor", "weight_formats"},
    {"checkpoint_gguf_header", "checkpoint_pth_header"},
    {"checkpoint_base", "checkpoint_safetensors_header"},
    {"checkpoint_gguf_parts", "checkpoint_gguf_blocks"},
    {"checkpoint_hf_config", "checkpoint_hf_files"},
    {"checkpoint_hf", "checkpoint_meta", "checkpoint_gguf", "checkpoint_random"},
    {"checkpoint_quantized"},
    {"checkpoint", "checkpoint_summary", "fetch"},
    {"quantize", "engine", "request", "texts"},
    {"accounting", "measure", "scoring"},
    {"text_printer", "needle", "memory_timeline", "self_check"},
    {"interactive", "report", "preflight"},
    {"eval_plan"},
    {"eval_report"},
    {"generate", "eval"},
    {"scripts"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def name_of(path: Path) -> str:
    return path.stem if path.parent == ROOT else path.parent.name


def imported(path: Path) -> set[str]:
    """Our own modules that a file imports, anywhere but where it runs as a program."""
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if "__main__" not in ast.unparse(node)[:30]]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names & OURS


def test_every_module_has_its_level():
    assert {name_of(path) for path in SOURCES} == set(LEVEL)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_downwards(path):
    above = {name for name in imported(path) if LEVEL[name] > LEVEL[name_of(path)]}
    assert not above


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [("model", {"kv_cache", "checkpoint"}), ("kernels", {"kv_cache", "model"})],
)
def test_the_model_does_not_know_the_cache_nor_the_kernels_either(module, forbidden):
    files = [path for path in SOURCES if name_of(path) == module]
    assert files
    for path in files:
        assert not imported(path) & forbidden


@pytest.mark.parametrize(
    "module",
    [
        "config",
        "command",
        "results",
        "stats",
        "durable",
        "eval_config",
        "generate_config",
        "reporting.commands",
        "summary",
    ],
)
def test_light_modules_do_not_import_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


COMMANDS = [path for path in SOURCES if "sys.exit(run(main" in path.read_text()]


def brings_torch(path: Path) -> bool:
    """Whether importing a file imports torch, itself or by what it imports of ours."""
    if "import torch" in path.read_text():
        return True
    names = [ROOT / f"{name}.py" for name in imported(path)]
    return any(brings_torch(file) for file in names if file.exists())


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_command_heeds_signals_before_it_imports_torch(path):
    text = path.read_text()
    first = min(
        (node.lineno for node in ast.walk(ast.parse(text)) if is_heavy_import(node)), default=None
    )
    if first is not None:
        assert any("    end_on_signals()" in line for line in text.splitlines()[: first - 1])


def is_heavy_import(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [node.module or ""]
    else:
        return False
    files = [ROOT / f"{name}.py" for name in names]
    return "torch" in names or any(brings_torch(file) for file in files if file.exists())


def faults(tree: ast.AST):
    """Line and name of everything that this project does without."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            yield node.lineno, "global or nonlocal"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except"
        if isinstance(node, ast.Assign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                text = ast.unparse(target)
                if text == "print" or text.startswith(("torch._inductor.config", "torch._dynamo")):
                    yield node.lineno, f"assignment to {text}"
        if isinstance(node, ast.Call):
            text = ast.unparse(node)
            if text.startswith("hasattr(") and "cache" in text:
                yield node.lineno, "asks a cache what it is"
            if text.startswith("isinstance(") and "Format" in text:
                yield node.lineno, "asks a format what it is"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_hidden_is_changed_and_nobody_is_asked_for_their_type(path):
    assert not list(faults(ast.parse(path.read_text())))


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    global x",
        "try:\n    pass\nexcept:\n    pass",
        "print = None",
        "torch._inductor.config.fx_graph_cache = True",
        "hasattr(cache, 'bits')",
        "isinstance(kv, KVFormat)",
    ],
)
def test_the_fault_finder_finds_each_fault(code):
    assert list(faults(ast.parse(code)))


def test_every_test_file_belongs_to_a_module():
    names = {p.stem for p in SOURCES} | {"architecture", "benchmarks", "faults", "records"}
    names.add("reporting")
    for path in (ROOT / "tests").glob("test_*.py"):
        module = path.stem.removeprefix("test_")
        assert any(module == name or module.startswith(f"{name}_") for name in names), path
