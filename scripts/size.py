"""How large the package is, beside the limits that it is to come to: `python scripts/size.py`."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "stagewright"
WANTED = {
    "lines of the package": 22_000,
    "lines of the longest file": 400,
    "lines of the longest function": 60,
    "lines of a function on average": 12,
    "public module-level names": 700,
    "numeric tuning constants": 60,
}


def measure() -> dict[str, float]:
    """Each figure of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    texts = {file: file.read_text(encoding="utf-8") for file in files}
    trees = {file: ast.parse(text) for file, text in texts.items()}
    lines = {file: text.count("\n") for file, text in texts.items()}
    functions = [length for tree in trees.values() for length in _function_lines(tree)]
    names = [name for tree in trees.values() for name in _public_names(tree)]
    return {
        "lines of the package": sum(lines.values()),
        "lines of the longest file": max(lines.values()),
        "lines of the longest function": max(functions),
        "lines of a function on average": round(sum(functions) / len(functions), 1),
        "public module-level names": len(names),
        "numeric tuning constants": sum(_num_constants(tree) for tree in trees.values()),
    }


def lines_by_room() -> dict[str, int]:
    """The lines of each folder of the package, and of the files beside them."""
    found: dict[str, int] = {}
    for file in PACKAGE.rglob("*.py"):
        inside = file.relative_to(PACKAGE).parts
        room = inside[0] if len(inside) > 1 else "."
        found[room] = found.get(room, 0) + file.read_text(encoding="utf-8").count("\n")
    return dict(sorted(found.items()))


def lines_of_tests() -> int:
    """The lines of all tests."""
    return sum(file.read_text(encoding="utf-8").count("\n") for file in (ROOT / "tests").rglob("*.py"))


def _function_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def _public_names(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            parts = [
                each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
            names = [each.id for each in parts if isinstance(each, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def _num_constants(tree: ast.Module) -> int:
    """Names in capitals at the top of a file whose value is a number."""
    found = 0
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
        values = node.value.elts if isinstance(node.value, ast.Tuple) and len(names) > 1 else [node.value] * len(names)
        pairs = zip(names, values)
        found += sum(isinstance(name, ast.Name) and name.id.isupper() and _is_number(value) for name, value in pairs)
    return found


def _is_number(value: ast.expr) -> bool:
    if isinstance(value, ast.Constant):
        return isinstance(value.value, int | float) and not isinstance(value.value, bool)
    if isinstance(value, ast.UnaryOp):
        return _is_number(value.operand)
    return isinstance(value, ast.BinOp) and _is_number(value.left) and _is_number(value.right)


def main() -> int:
    """Prints the table; 1 where a limit is not kept yet."""
    found, code = measure(), 0
    for name, value in found.items():
        is_kept = value <= WANTED[name]
        code |= not is_kept
        print(f"{name:32} {value:>9,}   at most {WANTED[name]:>7,}{'' if is_kept else '   not yet'}")
    share = lines_of_tests() / found["lines of the package"]
    print(
        f"{'lines of tests to lines of code':32} {share:>9.2f}   at least     0.7{'' if share >= 0.7 else '   not yet'}"
    )
    print("\n" + "   ".join(f"{room} {lines:,}" for room, lines in lines_by_room().items()))
    return int(code or share < 0.7)


if __name__ == "__main__":
    sys.exit(main())
