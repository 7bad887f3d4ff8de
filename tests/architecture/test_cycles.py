"""No import cycles between modules, not even for type checking, and no class name that is defined twice."""

import ast

from tests.architecture.source import Source, imports, package_sources


def test_no_module_imports_itself_through_others():
    assert cycles(package_sources()) == []


def test_no_two_classes_share_a_name():
    assert shared_class_names(package_sources()) == []


def test_a_cycle_for_type_checking_is_found():
    report = Source("report/report.py", "if TYPE_CHECKING:\n    from weft.report.evidence import Evidence")
    evidence = Source("report/evidence.py", "def show():\n    from weft.report import report")
    assert cycles([report, evidence]) == [["weft.report.evidence", "weft.report.report"]]
    assert cycles([report, Source("report/evidence.py", "import ast")]) == []


def test_a_class_name_that_is_defined_twice_is_found():
    first, second = Source("graph/host.py", "class Wait: ..."), Source("plan/plan.py", "class Wait: ...")
    assert shared_class_names([first, second]) == ["Wait: graph/host.py, plan/plan.py"]
    assert shared_class_names([first]) == []


def shared_class_names(sources: list[Source]) -> list[str]:
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(source.path)
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(places.items()) if len(paths) > 1]


def cycles(sources: list[Source]) -> list[list[str]]:
    """Sets of modules that import each other, each set sorted. Packages count by their `__init__.py`."""
    names = {module_name(source): source for source in sources}
    edges = {name: imported_modules(source, names) - {name} for name, source in names.items()}
    reachable = {name: reach(name, edges) for name in edges}
    found = {tuple(sorted(other for other in reachable[name] if name in reachable[other])) for name in edges}
    return [list(group) for group in sorted(found) if group]


def module_name(source: Source) -> str:
    parts = [*source.package, *([] if source.stem == "__init__" else [source.stem])]
    return ".".join(parts)


def imported_modules(source: Source, names: dict[str, Source]) -> set[str]:
    """The modules of the package that a file imports: for `from a import b`, `a.b` if that is a module, else `a`."""
    found: set[str] = set()
    for each in imports(source):
        parts = each.origin.split(".")
        longest = next((".".join(parts[:k]) for k in range(len(parts), 0, -1) if ".".join(parts[:k]) in names), None)
        if longest is not None and longest != "weft":
            found.add(longest)
    return found


def reach(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    left = list(edges[start])
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += edges[name]
    return seen
