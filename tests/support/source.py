"""The product's source as data: which modules there are and what each imports. Nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = {
    "adaptersync_core": REPOSITORY / "shared" / "adaptersync_core",
    "adaptersync": REPOSITORY / "services" / "adaptersync",
    "adaptersync_tools": REPOSITORY / "tools" / "adaptersync_tools",
}


@dataclass(frozen=True)
class Import:
    """One imported name, absolute: `from a import b` is `a.b`. `eager`: executed when the module is imported."""

    name: str
    line: int
    eager: bool


@dataclass(frozen=True)
class Module:
    """`name` is how it is imported, `package` the package its relative imports start from."""

    name: str
    package: str
    path: Path

    def imports(self) -> Iterator[Import]:
        yield from imports(self.path.read_text(), self.package)


def modules() -> list[Module]:
    """Every module of the three packages."""
    found = []
    for name, root in PACKAGES.items():
        for path in sorted(root.rglob("*.py")):
            parts = [name, *path.relative_to(root).with_suffix("").parts]
            if parts[-1] == "__init__":
                found.append(Module(".".join(parts[:-1]), ".".join(parts[:-1]), path))
            else:
                found.append(Module(".".join(parts), ".".join(parts[:-1]), path))
    return found


def imports(source: str, package: str) -> Iterator[Import]:
    """Every import statement, those inside functions and `if TYPE_CHECKING` included."""
    tree = ast.parse(source)
    later = {id(node) for body in ast.walk(tree) if _is_lazy(body) for node in ast.walk(body)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (Import(name, node.lineno, id(node) not in later) for name in names)


def _is_lazy(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)


def within(name: str, package: str) -> bool:
    """Whether a dotted name is a package or something in it."""
    return name == package or name.startswith(package + ".")
