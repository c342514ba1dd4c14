"""Which room may import which. The sources are read: imports in functions and under TYPE_CHECKING count too."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "replayssm_eval": ROOT / "replayssm_eval",
    "replayssm_emulation": ROOT / "emulation" / "replayssm_emulation",
    "replayssm_kernels": ROOT / "kernels" / "replayssm_kernels",
    "replayssm_tasks": ROOT / "tasks" / "replayssm_tasks",
}
COMMANDS = ["kl", "accuracy", "quartiles", "bench"]
# Top to bottom. A room imports itself and lower floors; rooms of one floor do not know each other.
FLOORS = [
    ["cli"],
    COMMANDS,
    ["inference"],
    ["models"],
    ["results"],
    ["replayssm_tasks", "replayssm_kernels"],
    ["replayssm_emulation"],
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FORBIDDEN = {("quartiles", "inference"), ("quartiles", "models")}  # quartiles needs no model
# The package itself (its API), `python -m` and lm-eval's command stand above all floors.
ENTRANCES = {"replayssm_eval", "replayssm_eval.__main__", "replayssm_eval.lm_eval"}


def module_files() -> dict[str, Path]:
    """Name of every module of the four packages -> its file."""
    files = {}
    for package, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imported_modules(tree: ast.AST, module: str, is_package: bool, known: set[str]) -> set[str]:
    """Those of `known` that `tree` imports. `from package import name` is `package.name` where that is a module."""
    targets = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                package = package[: len(package) - node.level + 1]
                base = ".".join([*package, *filter(None, [node.module])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                targets.add(submodule if submodule in known else base)
    return targets & known


def without_lazy_imports(tree: ast.Module) -> ast.Module:
    """The statements that run when the module is imported: no function bodies, nothing under `if TYPE_CHECKING`."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return None

        visit_AsyncFunctionDef = visit_FunctionDef

        def visit_If(self, node):
            if "TYPE_CHECKING" in ast.unparse(node.test):
                return [self.visit(statement) for statement in node.orelse]
            return self.generic_visit(node)

    return Strip().visit(tree)


def imports(lazy: bool) -> dict[str, set[str]]:
    """Module -> modules of the project that it imports: everywhere, or only while it is loaded."""
    files = module_files()
    graph = {}
    for module, path in files.items():
        tree = ast.parse(path.read_text())
        tree = tree if lazy else without_lazy_imports(tree)
        graph[module] = imported_modules(tree, module, path.name == "__init__.py", set(files)) - {module}
    return graph


def room(module: str) -> str:
    package, *rest = module.split(".")
    return rest[0] if package == "replayssm_eval" and rest else package


def may_import(importer: str, imported: str) -> bool:
    if importer == imported:
        return True
    return imported in FLOOR and FLOOR[importer] < FLOOR[imported] and (importer, imported) not in FORBIDDEN


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module: each reaches every other of them."""
    reached = {}
    for module in graph:
        seen: set[str] = set()
        waiting = list(graph[module])
        while waiting:
            if (target := waiting.pop()) not in seen:
                seen.add(target)
                waiting += graph[target]
        reached[module] = seen
    components = {frozenset({m, *(n for n in reached[m] if m in reached[n])}) for m in graph if m in reached[m]}
    return sorted(sorted(component) for component in components)


def test_every_module_stands_in_a_room() -> None:
    strangers = [m for m in module_files() if m not in ENTRANCES and room(m) not in FLOOR]
    assert not strangers, f"not in a room of {FLOORS}: {strangers}"


def test_imports_go_down_only() -> None:
    wrong = [
        f"{module} -> {target}"
        for module, targets in imports(lazy=True).items()
        if module not in ENTRANCES and room(module) in FLOOR
        for target in sorted(targets)
        if not may_import(room(module), room(target)) and target != "replayssm_eval"
    ]
    assert not wrong, "\n".join(wrong)


def test_no_room_imports_the_package_above_it() -> None:
    """`replayssm_eval/__init__.py` exports the API from the rooms, so a room that imports it would go in a circle.

    A function may ask it for its version or its folder, once all is loaded.
    """
    graph = imports(lazy=False)
    wrong = [m for m, targets in graph.items() if "replayssm_eval" in targets and m not in ENTRANCES]
    assert not wrong, wrong


def test_no_import_circle() -> None:
    """Nor one that a lazy import hides. The test above covers imports of the package itself."""
    graph = {module: targets - ENTRANCES for module, targets in imports(lazy=True).items()}
    assert circles(graph) == []


# The rules themselves


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("cli", "kl", True),
        ("kl", "replayssm_tasks", True),
        ("inference", "replayssm_emulation", True),
        ("models", "inference", False),
        ("accuracy", "quartiles", False),
        ("quartiles", "results", True),
        ("quartiles", "models", False),
        ("replayssm_tasks", "replayssm_kernels", False),
        ("results", "replayssm_eval", False),
    ],
)
def test_floors(importer, imported, allowed) -> None:
    assert may_import(importer, imported) == allowed


def test_imports_of_every_form_are_seen() -> None:
    known = {"a", "a.b", "a.b.c", "a.d"}
    source = "import a.d\nfrom . import c\nfrom ..d import x\nfrom a import b, name\ndef f():\n    from a.b import c\n"
    tree = ast.parse(source)
    assert imported_modules(tree, "a.b.e", False, known) == {"a.d", "a.b.c", "a.b", "a"}
    assert imported_modules(ast.parse("from . import c"), "a.b", True, known) == {"a.b.c"}
    hidden = "if TYPE_CHECKING:\n    import a.d\nelse:\n    import a\nclass C:\n    def f(self):\n        import a.b\n"
    assert imported_modules(without_lazy_imports(ast.parse(hidden)), "e", False, known) == {"a"}


def test_circles_are_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e"}, "g": {"a"}}
    assert circles(graph) == [["a", "b", "c"], ["e", "f"]]
