"""Which modules of a package import which, read from the source without running it."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path


def module_name(file: Path, folder: Path) -> str:
    """`cinetile.plans.plan` for `plans/plan.py`, `cinetile.plans` for its `__init__.py`."""
    parts = [folder.name, *file.relative_to(folder).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(file: Path, module: str) -> Iterator[tuple[int, str, str | None]]:
    """Each import of a file, at any depth: its line, the module, and the name taken from it."""
    is_package = file.name == "__init__.py"
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                drop = node.level - 1 if is_package else node.level
                parents = module.split(".")[: len(module.split(".")) - drop]
                start = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, start, alias.name


class SourceImports:
    """The imports of one package, whose source lies in `folder`.

    `inside` maps each module to the modules of the package that it imports, and `outside` to the
    other packages, each with the line of the import. Imports inside functions count, and so do
    those for type checkers.
    """

    def __init__(self, folder: Path) -> None:
        files = {module_name(file, folder): file for file in sorted(folder.rglob("*.py"))}
        self.package = folder.name
        self.inside: dict[str, dict[str, int]] = {}
        self.outside: dict[str, dict[str, int]] = {}
        for module, file in files.items():
            inside, outside = {}, {}
            for line, start, name in imported_names(file, module):
                if start.split(".")[0] != self.package:
                    outside.setdefault(start.split(".")[0], line)
                elif name is not None and f"{start}.{name}" in files:
                    inside.setdefault(f"{start}.{name}", line)
                else:
                    inside.setdefault(start, line)
            self.inside[module] = inside
            self.outside[module] = outside

    def arrows(self) -> Iterator[tuple[str, str, int]]:
        """Each import of a module of the package: importer, imported module, line."""
        for module, imports in self.inside.items():
            for target, line in imports.items():
                yield module, target, line


def circle(imports: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Modules that import each other in a circle; empty where there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []
