"""Size caps, import order, quick start of the command line: on the tree and on planted faults."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "dflash_mlx"
FILE_CAP, FUNCTION_CAP = 400, 80  # lines

# A module imports only what stands before it here, and its own package.
LEVELS = (
    "errors paths segment features",
    "machine fast_blas kernels quantization registry hub gguf weights text detokenizer tokenizer",
    "cache",
    "layers",
    "models draft",
    "decode loader",
    "prompt generate drafting chat calibration pacing engine convert train plan trials",
    "bench",
    "cli",
)
ORDER = [name for level in LEVELS for name in level.split()]
# Of these packages decode sees the contract only.
CONTRACTS = {"models": "base", "draft": "base"}
HEAVY = {"mlx", "mlx_lm", "transformers", "huggingface_hub", "numpy", "tokenizers", "gguf"}


def _sources(root: Path) -> Iterator[Path]:
    """Files written by hand: Python, shell and Metal of the project's folders."""
    for folder in (PACKAGE, "scripts", "tests", "metal"):
        for file in sorted((root / folder).rglob("*")):
            if file.is_file() and (file.suffix in (".py", ".sh", ".metal", ".h") or _script(file)):
                yield file


def _script(file: Path) -> bool:
    return not file.suffix and file.read_bytes().startswith(b"#!")


def _is_python(file: Path) -> bool:
    return file.suffix == ".py" or (
        _script(file) and b"python" in file.read_bytes().split(b"\n")[0]
    )


def size_violations(root: Path) -> list[str]:
    found = []
    for file in _sources(root):
        place, text = file.relative_to(root), file.read_text()
        if (lines := len(text.splitlines())) > FILE_CAP:
            found.append(f"{place} has {lines} lines")
        if not _is_python(file):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_CAP:
                    found.append(f"{place}: {node.name} has {lines} lines")
    return found


def docstring_violations(root: Path) -> list[str]:
    found = []
    for file in _sources(root):
        if file.is_relative_to(root / "tests") or not _is_python(file):
            continue
        lines = len((ast.get_docstring(ast.parse(file.read_text())) or "").splitlines())
        if not 1 <= lines <= 5:
            found.append(f"{file.relative_to(root)}: module docstring of {lines} lines")
    return found


class _Imports(ast.NodeVisitor):
    """Names imported by a file as dotted strings; TYPE_CHECKING blocks count for nothing."""

    def __init__(self, in_functions: bool) -> None:
        self.names: list[str] = []
        self._in_functions = in_functions

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.orelse:
                self.visit(statement)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if self._in_functions:
            self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]

    def visit_Import(self, node: ast.Import) -> None:
        self.names += [alias.name for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = "." * node.level + (node.module or "")
        self.names += [f"{module}.{alias.name}" for alias in node.names]


def _imports(file: Path, in_functions: bool = True) -> list[str]:
    visitor = _Imports(in_functions)
    visitor.visit(ast.parse(file.read_text()))
    return visitor.names


def order_violations(root: Path) -> list[str]:
    found = []
    for file in sorted((root / PACKAGE).rglob("*.py")):
        parts = file.relative_to(root / PACKAGE).with_suffix("").parts
        if parts[0] in ("__init__", "__main__"):
            continue
        place = f"{PACKAGE}/{'/'.join(parts)}"
        if parts[0] not in ORDER:
            found.append(f"{place}: {parts[0]} has no place in the import order")
            continue
        for name in _imports(file):
            if fault := _fault(parts[0], name):
                found.append(f"{place}: {fault}")
    return found


def _fault(module: str, name: str) -> str | None:
    if name.startswith("."):
        return f"relative import {name}"
    package, _, inside = name.partition(".")
    other, _, member = inside.partition(".")
    if package != PACKAGE or other == module or other not in ORDER:
        return None
    if ORDER.index(other) > ORDER.index(module):
        return f"imports {other}, which comes later"
    if module == "decode" and other in CONTRACTS and member.split(".")[0] != CONTRACTS[other]:
        return f"imports {name}, not the contract"
    return None


def heavy_imports(root: Path, start: str) -> list[str]:
    """Chains from a module to a heavy package through imports at the head of files."""
    found, seen, waiting = [], set(), [(start, start)]
    while waiting:
        name, chain = waiting.pop()
        file = _file_of(root, name)
        if name in seen or file is None:
            continue
        seen.add(name)
        if _file_of(root, name.rpartition(".")[0]):
            waiting.append((name.rpartition(".")[0], chain))
        for imported in _imports(file, in_functions=False):
            if imported.split(".")[0] in HEAVY:
                found.append(f"{chain} -> {imported}")
            for target in (imported, imported.rpartition(".")[0]):
                waiting.append((target, f"{chain} -> {target}"))
    return found


def _file_of(root: Path, name: str) -> Path | None:
    place = root.joinpath(*name.split(".")) if name else root
    candidates = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in candidates if name and file.is_file()), None)


def _cli_modules(root: Path) -> list[str]:
    return [f"{PACKAGE}.cli.{f.stem}" for f in sorted((root / PACKAGE / "cli").glob("*.py"))]


def test_the_tree_keeps_the_caps() -> None:
    assert len(list(_sources(ROOT))) > 20
    assert size_violations(ROOT) == []


def test_every_module_says_what_it_does() -> None:
    assert docstring_violations(ROOT) == []


def test_imports_go_to_earlier_levels_only() -> None:
    assert order_violations(ROOT) == []


def test_the_command_line_starts_without_heavy_packages() -> None:
    assert len(_cli_modules(ROOT)) >= 5
    assert [chain for name in _cli_modules(ROOT) for chain in heavy_imports(ROOT, name)] == []


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("dflash_mlx/a.py", "x = 1\n" * 401, "dflash_mlx/a.py has 401 lines"),
        ("metal/a.metal", "//\n" * 401, "metal/a.metal has 401 lines"),
        ("scripts/a", "#!/bin/sh\n" + ":\n" * 400, "scripts/a has 401 lines"),
        ("tests/a.py", "def f():\n" + "    f()\n" * 80, "tests/a.py: f has 81 lines"),
        (
            "scripts/make",
            "#!/usr/bin/env python3\nclass A:\n    async def f():\n" + "        f()\n" * 80,
            "scripts/make: f has 81 lines",
        ),
    ],
)
def test_a_cap_that_is_passed_is_found(tmp_path: Path, name: str, text: str, fault: str) -> None:
    assert size_violations(_tree(tmp_path, {name: text})) == [fault]


def test_what_just_fits_the_caps_is_allowed(tmp_path: Path) -> None:
    text = "def f():\n" + "    f()\n" * 79 + "x = 1\n" * 320
    assert size_violations(_tree(tmp_path, {"dflash_mlx/a.py": text})) == []


@pytest.mark.parametrize(("text", "lines"), [("x = 1\n", 0), ('"""a\nb\nc\nd\ne\nf"""\n', 6)])
def test_a_missing_or_long_docstring_is_found(tmp_path: Path, text: str, lines: int) -> None:
    tree = _tree(tmp_path, {"dflash_mlx/a.py": text, "dflash_mlx/b.py": '"""Good."""\n'})
    assert docstring_violations(tree) == [f"dflash_mlx/a.py: module docstring of {lines} lines"]


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("hub/a", "import dflash_mlx.cache.kv", "imports cache, which comes later"),
        ("hub/a", "from dflash_mlx import engine", "imports engine, which comes later"),
        (
            "gguf",
            "def f():\n    from dflash_mlx.tokenizer import Tokenizer",
            "imports tokenizer, which comes later",
        ),
        ("decode/a", "from dflash_mlx.models.llama import Llama", "imports dflash_mlx.models"),
        ("decode/a", "from dflash_mlx.draft import dflash", "imports dflash_mlx.draft.dflash"),
        ("cache/kv", "from .base import LayerCache", "relative import .base.LayerCache"),
        ("misc", "", "misc has no place in the import order"),
    ],
)
def test_an_import_out_of_order_is_found(tmp_path: Path, name: str, text: str, fault: str) -> None:
    found = order_violations(_tree(tmp_path, {f"dflash_mlx/{name}.py": text}))
    assert len(found) == 1
    assert fault in found[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "hub/a",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import dflash_mlx.engine",
        ),
        ("decode/a", "from dflash_mlx.models.base import Target\nfrom dflash_mlx import paths"),
        ("cli/a", "def f():\n    from dflash_mlx import engine"),
        ("cache/kv", "from dflash_mlx.cache.base import LayerCache\nimport mlx.core"),
    ],
)
def test_an_import_in_order_is_allowed(tmp_path: Path, name: str, text: str) -> None:
    assert order_violations(_tree(tmp_path, {f"dflash_mlx/{name}.py": text})) == []


def test_a_heavy_import_is_found_through_other_files(tmp_path: Path) -> None:
    tree = _tree(
        tmp_path,
        {
            "dflash_mlx/__init__.py": "",
            "dflash_mlx/cli/__init__.py": "",
            "dflash_mlx/cli/a.py": "from dflash_mlx import paths\ndef f():\n    import mlx",
            "dflash_mlx/cli/b.py": "from dflash_mlx.cache.base import X",
            "dflash_mlx/cache/__init__.py": "import mlx.core as mx",
            "dflash_mlx/cache/base.py": "",
            "dflash_mlx/paths.py": "",
        },
    )
    assert heavy_imports(tree, "dflash_mlx.cli.a") == []
    assert len(heavy_imports(tree, "dflash_mlx.cli.b")) == 1
