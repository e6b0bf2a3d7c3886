"""Who may import whom, and what may not be in the tree."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVICES = ("coordinator", "draft_worker", "target_worker")
PACKAGES = ("outrider", *SERVICES)

STARTS_SERVICES = ("outrider/cli/",)
"""The command line starts the three services, so it alone in `outrider/` may import them."""
SPEAKS_PROTOBUF = ("outrider/serving/", "outrider/v1/", "outrider/client.py", *(f"{s}/server.py" for s in SERVICES))
"""Everything else converts at the edge and never sees a message."""
HEAVY = ("torch", "transformers", "ray")


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def imported_modules(path: Path) -> frozenset[str]:
    """Absolute dotted names of what a file imports, wherever in the file: `from a import b` gives `a` and `a.b`."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    return frozenset(_imports(ast.parse(path.read_text()), package))


def _imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*parents, *([node.module] if node.module else [])))
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def importers(paths: list[Path], roots: tuple[str, ...]) -> dict[str, list[str]]:
    """For each offending file, the imported names whose first part is one of `roots`."""
    found = {str(p.relative_to(ROOT)): [m for m in imported_modules(p) if m.split(".")[0] in roots] for p in paths}
    return {path: sorted(modules) for path, modules in found.items() if modules}


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("service", SERVICES)
def test_services_never_import_one_another(service: str) -> None:
    assert sources(service)
    others = tuple(s for s in SERVICES if s != service)
    assert importers(sources(service), others) == {}


def test_only_the_command_line_imports_services() -> None:
    shared = [p for p in sources("outrider") if not str(p.relative_to(ROOT)).startswith(STARTS_SERVICES)]
    assert importers(shared, SERVICES) == {}


def test_only_deploy_ray_imports_ray() -> None:
    assert importers([p for package in PACKAGES for p in sources(package)], ("ray",)) == {}


@pytest.mark.parametrize("module", ["coordinator.server", "outrider.client"])
def test_runs_without_torch_transformers_and_ray(module: str) -> None:
    program = f"import sys, json, {module}; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_only_the_edge_speaks_protobuf() -> None:
    offenders = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in sources(package)
        if any(part.endswith(("_pb2", "_pb2_grpc")) for m in imported_modules(path) for part in m.split("."))
        and not str(path.relative_to(ROOT)).startswith(SPEAKS_PROTOBUF)
    ]
    assert not offenders, f"only {', '.join(SPEAKS_PROTOBUF)} may import a _pb2 module: {offenders}"


def test_no_file_names_a_path_of_one_machine() -> None:
    machine_path = re.compile(r"(?<![A-Za-z0-9_.$}*-])/(work|root|tmp|farm|home)/")
    offenders = []
    for path in tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        offenders += [f"{path.relative_to(ROOT)}: {line}" for line in text.splitlines() if machine_path.search(line)]
    assert not offenders


def test_top_level_holds_the_agreed_folders_only() -> None:
    allowed = {*PACKAGES, "protos", "deploy", "docs", "tests", ".ci"}
    folders = {p.relative_to(ROOT).parts[0] for p in tracked_files() if len(p.relative_to(ROOT).parts) > 1}
    assert folders == allowed


def test_tests_folder_shadows_no_package() -> None:
    """`tests/` is on the path for shared helpers: an `__init__.py` in `tests/ray` would hide Ray itself."""
    assert not list((ROOT / "tests").rglob("__init__.py"))
