"""Nothing that came from outside is unpickled, but weights as weights only."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("outrider", "coordinator", "draft_worker", "target_worker", "deploy")
UNPICKLERS = {"_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def faults(source: str) -> list[str]:
    """Imports of what unpickles, uses of `pickle` but for its error, `torch.load` that may run code, `numpy.load` that
    allows it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.partition(".")[0] in UNPICKLERS]
            case ast.ImportFrom(module=str(module)):
                found += [module] if module.partition(".")[0] in UNPICKLERS | {"pickle"} else []
            case ast.Attribute(value=ast.Name(id="pickle"), attr=used) if used != "UnpicklingError":
                found.append(f"pickle.{used}")
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
                told = {word.arg: getattr(word.value, "value", None) for word in keywords}
                found += [] if told.get("weights_only") is True else ["torch.load"]
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                found.append("allow_pickle")
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_nothing_is_unpickled(folder: str) -> None:
    paths = list((ROOT / folder).rglob("*.py"))
    assert paths
    assert {str(path): found for path in paths if (found := faults(path.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "source",
    ["pickle.loads(data)", "from pickle import loads", "import dill as d", "torch.load(path)",
     "numpy.load(path, allow_pickle=True)", "torch.load(path, weights_only=False)"],
)  # fmt: skip
def test_what_would_unpickle_is_seen(source: str) -> None:
    assert faults(source)
    assert not faults("torch.load(path, map_location='cpu', weights_only=True)\nnumpy.load(path)")
