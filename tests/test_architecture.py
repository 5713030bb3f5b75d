"""Who may import whom, read from the source; what `import lilicorr` brings in; sizes of files and functions.

The table is the architecture. A line that has to change here is a decision to write down in docs/decisions.md.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

# Which modules of lilicorr a module of lilicorr may import. Imports for annotations only do not count.
# `package.*` stands for every module of a package, in both columns.
ALLOWED = {
    # records and small tools: nothing of the model
    "blocks": "",
    "values": "",
    "config": "values",
    "folder": "",
    "provenance": "",
    "stdlib": "",
    "rows": "",
    "chat": "",
    "parquet": "folder",
    # public data and small targets
    "tiny": "folder",
    "wheels": "folder provenance",
    "smollm2": "folder provenance wheels",
    "benchmarks": "folder provenance rows wheels",
    "packages": "benchmarks folder provenance rows wheels",
    "prompts": "config packages parquet rows stdlib",
    # mathematics on tensors
    "kernels.*": "blocks kernels.*",
    "losses": "blocks config kernels.*",
    "lattice": "blocks config kernels.*",
    "verify": "blocks config kernels.*",
    "processing": "",
    "logprobs": "kernels.*",
    # the definition of these kernels is older than they are; it imports none of them
    "kernels.accept": "blocks kernels.* verify",
    "kernels.match_walk": "blocks kernels.* lattice",
    "kernels.nodes": "blocks kernels.* lattice",
    # the model
    "target": "blocks config smollm2 tiny wheels",
    "drafter": "blocks config target",
    "block_mask": "drafter",
    "anchors": "blocks config",
    "heads": "heads.*",
    "heads.base": "blocks config kernels.* losses verify",
    "heads.*": "blocks config heads.base kernels.* lattice losses verify",
    "draft_model": "anchors block_mask blocks config drafter heads losses target",
    "checkpoint.*": "blocks checkpoint.* config draft_model drafter folder heads heads.base provenance target",
    # decoding
    "decode": "blocks config draft_model logprobs processing target verify",
    "engine.*": "blocks config decode draft_model engine.* kernels.* logprobs processing target verify",
    # training
    "corpus": "blocks chat config folder provenance",
    "deal": "",
    "features": "blocks corpus target",
    "sharding": "draft_model",
    "state": "folder",
    "tracking": "provenance",
    "training": "anchors block_mask blocks checkpoint.* config corpus deal draft_model features losses "
    "provenance sharding state target",
    "budget": "blocks config draft_model drafter losses target",
    # making answers, measuring
    "generator": "blocks chat config decode engine.* prompts target",
    "acceptance": "blocks",
    "plots": "",
    "results": "",
    "tables": "results",
    "evaluate": "acceptance benchmarks blocks chat config decode draft_model engine.* lattice prompts provenance "
    "results tables target",
    "throughput": "acceptance chat config decode draft_model engine.* evaluate target",
    "summary": "",
}
# What lilicorr may import of the world: at the top of a module, and inside the functions of one that says why.
WORLD = {"jinja2", "matplotlib", "numpy", "pyarrow", "safetensors", "tokenizers", "torch", "transformers", "yaml"}
INSIDE = {
    "checkpoint.hub": {"huggingface_hub"},
    "summary": {"rich"},
    "smollm2": {"gguf"},
    "tracking": {"tensorboardX", "mlflow", "wandb"},
}
WHERE_INSTALLED = {"kernels.language": {"triton"}}  # the one module that says what is there without it
NEVER = {"ray", "vllm", "fastapi", "pydantic", "serve_app", "pipelines"}


def modules(package: str) -> dict[str, Path]:
    """Dotted names (below the package) and files of a package; the package itself is ''."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT / package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


LILICORR = modules("lilicorr")


def imports(path: Path, package: str = "") -> Iterator[tuple[str, bool]]:
    """Absolute names a file imports, and whether at its top; `from a import b` is a.b. Type-only ones are left out."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for statement in block.body
        for node in ast.walk(statement)
    }
    inside = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) not in inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ((f"{node.module}.{alias.name}", id(node) not in inside) for alias in node.names)


def own_module(name: str) -> str | None:
    """The module of lilicorr that an imported name lies in, '' for the package itself, None outside."""
    parts = name.split(".")
    if parts[0] != "lilicorr":
        return None
    for end in range(len(parts), 0, -1):
        module = ".".join(parts[1:end])
        if module in LILICORR:
            return module
    raise AssertionError(f"{name} is no module of lilicorr")


def matches(module: str, pattern: str) -> bool:
    """Whether a module falls under a name or a `package.*`."""
    if pattern.endswith(".*"):
        return module == pattern[:-2] or module.startswith(pattern[:-1])
    return module == pattern


def row_of(module: str) -> str:
    """The most exact line of the table for a module."""
    rows = [pattern for pattern in ALLOWED if matches(module, pattern)]
    assert rows, f"lilicorr.{module} has no line in the import table of {Path(__file__).name}"
    return min(rows, key=lambda pattern: pattern.endswith(".*"))


@pytest.mark.parametrize("module", [name for name in LILICORR if name])
def test_a_module_imports_only_what_the_table_allows(module: str) -> None:
    allowed = ALLOWED[row_of(module)].split()
    for name, _ in imports(LILICORR[module]):
        own = own_module(name)
        if own is not None and own != module:
            assert any(matches(own, pattern) for pattern in allowed), f"lilicorr.{module} must not import {name}"


@pytest.mark.parametrize("module", list(LILICORR))
def test_lilicorr_needs_no_other_package(module: str) -> None:
    world = WORLD | WHERE_INSTALLED.get(module, set())
    for name, at_top in imports(LILICORR[module]):
        root = name.partition(".")[0]
        assert root not in NEVER, f"lilicorr.{module} must never import {root}"
        if root != "lilicorr" and root not in sys.stdlib_module_names:
            inside = not at_top and root in INSIDE.get(module, set())
            assert root in world or inside, f"lilicorr.{module} must not import {root}"


def test_the_table_has_no_cycle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, f"import cycle: {' -> '.join((*path, module))}"
        if module not in done:
            for name, _ in imports(LILICORR[module]):
                own = own_module(name)
                if own and own != module:
                    visit(own, (*path, module))
            done.add(module)

    for module in LILICORR:
        visit(module, ())


def test_only_deploy_knows_the_server() -> None:
    for module, path in modules("pipelines").items():
        roots = {name.partition(".")[0] for name, _ in imports(path)}
        assert "serve_app" not in roots or module == "deploy", f"pipelines.{module} must not import serve_app"
    for module, path in modules("serve_app").items():
        roots = {name.partition(".")[0] for name, _ in imports(path)}
        assert "pipelines" not in roots, f"serve_app.{module} must not import pipelines"


@pytest.mark.parametrize("everything", [False, True], ids=["import lilicorr", "every module"])
def test_lilicorr_brings_in_neither_ray_nor_vllm(everything: bool) -> None:
    names = [f"lilicorr.{module}".rstrip(".") for module in LILICORR] if everything else ["lilicorr"]
    code = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint(*sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=240)
    loaded = done.stdout.split()
    assert "lilicorr" in loaded and not {"ray", "vllm", "fastapi"} & set(loaded)
    assert everything or "torch" not in loaded


def test_every_head_is_in_heads() -> None:
    registry = importlib.import_module("lilicorr.heads").HEADS
    files = {name.removeprefix("heads.") for name in LILICORR if name.startswith("heads.")} - {"base"}
    assert set(registry) == files
    for name, head in registry.items():
        assert head.__module__ == f"lilicorr.heads.{name}"


def sources() -> list[Path]:
    """Every Python file of the repository."""
    folders = ("lilicorr", "pipelines", "serve_app", "benches", "tests")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_stay_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_FILE_LINES, f"{path} has {len(text.splitlines())} lines"
    if "kernels" in path.parts:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path}:{node.lineno} {node.name} has {length} lines"


def test_folders_are_at_most_two_deep() -> None:
    for module in LILICORR:
        assert module.count(".") <= 1, f"lilicorr.{module} lies too deep"


def test_test_files_have_names_of_their_own() -> None:
    """Without packages, pytest cannot collect two files of one name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
