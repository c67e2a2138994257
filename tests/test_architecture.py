"""The architecture: imports run one way, as docs/architecture.md tells."""

import ast
import re
from pathlib import Path

import pytest
from source_imports import SourceImports, circle

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "cinetile"

# From the ground up. A module imports only what stands on its own line and before it; what shares a
# line is one room, except for the wings side by side in SIDE_BY_SIDE.
ORDER = (
    "_checks",
    "_extras",
    "files",
    "grid",
    "placement",
    "masks",
    "plans",
    "kernels",
    "attention",
    "routing",
    "patterns",
    "policy",
    "parallel",
    "layer",
    "models",
    "lab",
    "integrations",
    "",  # cinetile/__init__.py: the public names
    "cli",
)
# Wings at the same height: none imports the other.
SIDE_BY_SIDE = (("lab", "integrations"),)
CORE = ORDER[: ORDER.index("layer") + 1]
# Frameworks that the core does without, and the folder of the core that is there for one of them.
FRAMEWORKS = frozenset({"diffusers", "equinox", "flax", "torch", "torchax", "transformers"})
MAY_IMPORT = {"cinetile.kernels.torch": frozenset({"torch"})}


def room(module: str) -> str:
    """The part of the package that a module belongs to: `plans` for `cinetile.plans.plan`."""
    return [*module.split("."), ""][1]


def within(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def against_the_order(imports: SourceImports) -> list[str]:
    """Imports of what stands higher in the house."""
    found = [
        f"{module}: has no place in ORDER" for module in imports.inside if room(module) not in ORDER
    ]
    if found:
        return found
    return [
        f"{module}:{line} imports {target}"
        for module, target, line in imports.arrows()
        if ORDER.index(room(target)) > ORDER.index(room(module))
        or any({room(target), room(module)} == set(pair) for pair in SIDE_BY_SIDE)
    ]


def between_integrations(imports: SourceImports) -> list[str]:
    """Imports of one integration in another."""

    def integration(module: str) -> str:
        parts = module.split(".")
        return parts[2] if parts[1:2] == ["integrations"] and len(parts) > 2 else ""

    return [
        f"{module}:{line} imports {target}"
        for module, target, line in imports.arrows()
        if integration(module)
        and integration(target)
        and integration(module) != integration(target)
    ]


def frameworks_in_the_core(imports: SourceImports) -> list[str]:
    """Imports of a framework in the core."""
    return [
        f"{module}:{line} imports {package}"
        for module, packages in imports.outside.items()
        if room(module) in CORE
        for package, line in packages.items()
        if package in FRAMEWORKS
        and not any(
            within(module, parent) and package in allowed for parent, allowed in MAY_IMPORT.items()
        )
    ]


@pytest.fixture(scope="module")
def imports() -> SourceImports:
    return SourceImports(PACKAGE)


def planted(folder: Path, files: dict[str, str]) -> SourceImports:
    """The imports of a made-up package that holds `files`."""
    package = folder / "cinetile"
    for name, text in {"__init__.py": "", **files}.items():
        file = package / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return SourceImports(package)


class TestImportOrder:
    def test_every_import_runs_down(self, imports: SourceImports) -> None:
        assert against_the_order(imports) == []

    def test_integrations_do_without_each_other(self, imports: SourceImports) -> None:
        assert between_integrations(imports) == []

    def test_the_core_does_without_frameworks(self, imports: SourceImports) -> None:
        assert frameworks_in_the_core(imports) == []

    def test_no_modules_import_each_other_in_a_circle(self, imports: SourceImports) -> None:
        assert circle(imports.inside) == []

    def test_every_import_leads_to_a_module(self, imports: SourceImports) -> None:
        missing = [arrow for arrow in imports.arrows() if arrow[1] not in imports.inside]
        assert missing == []

    @pytest.mark.parametrize(
        "statement",
        [
            "from cinetile.plans import TilePlan",
            "from cinetile import plans",
            "import cinetile.plans.plan",
            "import cinetile",
            "from cinetile import TilePlan",
            "from ..plans import TilePlan",
            "from .. import plans",
            "def plan():\n    from cinetile.plans.plan import TilePlan\n    return TilePlan",
            "if True:\n    from cinetile.plans import plan",
        ],
    )
    def test_finds_an_import_that_runs_up(self, tmp_path: Path, statement: str) -> None:
        files = {"masks/__init__.py": "", "masks/edges.py": statement}
        files |= {"plans/__init__.py": "", "plans/plan.py": ""}
        (found,) = against_the_order(planted(tmp_path, files))
        assert found.startswith("cinetile.masks.edges:")

    def test_leaves_an_import_that_runs_down(self, tmp_path: Path) -> None:
        files = {"masks/__init__.py": "", "masks/edges.py": "import numpy as np\nimport cinetile_x"}
        files |= {"plans.py": "from cinetile import masks\nfrom cinetile.masks import edges"}
        files |= {"cli.py": "import cinetile\nfrom cinetile import plans, TilePlan"}
        imports = planted(tmp_path, files)
        assert against_the_order(imports) == []
        assert circle(imports.inside) == []

    def test_finds_a_module_without_a_place(self, tmp_path: Path) -> None:
        (found,) = against_the_order(planted(tmp_path, {"helpers.py": ""}))
        assert found == "cinetile.helpers: has no place in ORDER"

    @pytest.mark.parametrize(
        "files",
        [
            {"lab.py": "", "integrations/diffusers.py": "from cinetile.lab import metrics"},
            {"lab.py": "import cinetile.integrations.diffusers", "integrations/diffusers.py": ""},
        ],
    )
    def test_finds_an_import_between_wings(self, tmp_path: Path, files: dict[str, str]) -> None:
        files = {"integrations/__init__.py": "", **files}
        assert len(against_the_order(planted(tmp_path, files))) == 1

    def test_finds_an_import_between_integrations(self, tmp_path: Path) -> None:
        files = {f"integrations/{name}/__init__.py": "" for name in ("comfyui", "diffusers")}
        files["integrations/__init__.py"] = ""
        files["integrations/comfyui/nodes.py"] = "from cinetile.integrations import diffusers"
        (found,) = between_integrations(planted(tmp_path, files))
        assert (
            found == "cinetile.integrations.comfyui.nodes:1 imports cinetile.integrations.diffusers"
        )

    @pytest.mark.parametrize(
        "statement",
        ["import torch.nn", "from equinox import Module", "def f():\n    import diffusers"],
    )
    def test_finds_a_framework_in_the_core(self, tmp_path: Path, statement: str) -> None:
        files = {"layer.py": statement, "models.py": statement, "kernels/__init__.py": ""}
        files["kernels/torch/__init__.py"] = "import torch"
        (found,) = frameworks_in_the_core(planted(tmp_path, files))
        assert found.startswith("cinetile.layer:")

    def test_finds_a_circle(self, tmp_path: Path) -> None:
        files = {"plans/__init__.py": "from cinetile.plans import plan", "plans/files.py": ""}
        files["plans/plan.py"] = "def load():\n    from cinetile.plans import TilePlan"
        assert set(circle(planted(tmp_path, files).inside)) == {
            "cinetile.plans",
            "cinetile.plans.plan",
        }


MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
# How the docstring of a longer function starts the sentence that gives the reason.
REASON = "Long because "


def docstring_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = function.body[0]
    if ast.get_docstring(function) is None or first.end_lineno is None:
        return 0
    return first.end_lineno - first.lineno + 1


def long_functions(source: str) -> list[str]:
    """Functions over `MAX_FUNCTION_LINES` lines, docstring excluded, without a reason in it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assert node.end_lineno is not None
        lines = node.end_lineno - node.lineno + 1 - docstring_lines(node)
        reasons = REASON in " ".join((ast.get_docstring(node) or "").split())
        if lines > MAX_FUNCTION_LINES and not reasons:
            found.append(f"{node.name}: {lines} lines")
    return found


class TestSizes:
    """Files and functions can be read in one go, or say why not."""

    def test_files(self) -> None:
        lines = {file: len(file.read_text().splitlines()) for file in PACKAGE.rglob("*.py")}
        assert {file: count for file, count in lines.items() if count > MAX_FILE_LINES} == {}

    def test_functions(self) -> None:
        found = {file: long_functions(file.read_text()) for file in PACKAGE.rglob("*.py")}
        assert {file: functions for file, functions in found.items() if functions} == {}

    @pytest.mark.parametrize(
        ("docstring", "lines", "expected"),
        [
            ("Adds.", 57, []),
            ("Adds.", 60, ["add: 61 lines"]),
            ("Adds.\n\n    Long because\n    it is a table.\n    ", 60, []),
            ("\n".join(80 * ["Adds."]), 57, []),
        ],
    )
    def test_finds_long_functions(self, docstring: str, lines: int, expected: list[str]) -> None:
        body = "\n".join(lines * ["    a += 1"])
        assert long_functions(f'def add(a):\n    """{docstring}"""\n{body}\n') == expected


def check_tree(shown: list[str], there: set[str]) -> None:
    missing, surplus = sorted(there - set(shown)), sorted(set(shown) - there)
    assert not missing, f"add to the tree in docs/architecture.md: {missing}"
    assert not surplus, f"remove from the tree in docs/architecture.md: {surplus}"
    assert len(shown) == len(set(shown))


class TestTree:
    """The trees in docs/architecture.md, one path on each line."""

    PAGE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")

    def paths(self, root: str) -> list[str]:
        """The paths in the block that starts with `root/`, relative to it, without descriptions."""
        block = re.search(rf"^```text\n{root}/\n(.*?)^```", self.PAGE, re.MULTILINE | re.DOTALL)
        assert block is not None
        folders: list[str] = []
        found = []
        for line in block[1].splitlines():
            name = line.split()[0]
            depth = (len(line) - len(line.lstrip())) // 2 - 1
            folders[depth:] = [name.rstrip("/")]
            found.append("/".join(folders))
        return found

    def test_shows_the_package_as_it_is(self) -> None:
        modules = {file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py")}
        folders = {name.removesuffix("/__init__.py") for name in modules if "/__init__" in name}
        there = {name for name in modules if not name.endswith("__init__.py")} | folders
        check_tree(self.paths("src/cinetile"), there)

    def test_shows_the_native_kernel_as_it_is(self) -> None:
        native = ROOT / "native"
        files = [
            file.relative_to(native) for file in native.rglob("*") if file.suffix in {".cpp", ".h"}
        ]
        there = {file.with_suffix("").as_posix() for file in files}
        there |= {file.parent.as_posix() for file in files} - {"."}
        check_tree(self.paths("native"), there)

    def test_shows_wings_in_the_order_of_imports(self) -> None:
        """The packages and modules at the top of the tree stand as `ORDER` says."""
        shown = [path.removesuffix(".py") for path in self.paths("src/cinetile") if "/" not in path]
        assert shown == [name for name in ORDER if name]
