"""Fleet files, and the words for an actor that fits nowhere; no Ray cluster is started."""

from pathlib import Path

import pytest

pytest.importorskip("ray")

from deploy.ray.config import ConfigError, Pool, load_fleet
from deploy.ray.placement import explain, label_matches

FOLDER = Path(__file__).parents[2] / "deploy/ray"


@pytest.mark.parametrize("name", ["fleet.toml", "local.toml"])
def test_shipped_fleet_files_load(name: str) -> None:
    fleet = load_fleet(FOLDER / name)
    assert {pool.role for pool in fleet.pools} == {"draft", "target"}


def write(folder: Path, body: str) -> Path:
    path = folder / "fleet.toml"
    path.write_text(f'coordinators = ["c:1"]\n[[pools]]\nname = "t"\nrole = "target"\n{body}\n')
    return path


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("replicas = 0", r"pools\.0\.replicas"),
        ("num_gpu = 1", r"pools\.0\.num_gpu: Extra"),
        ("num_gpus = 1.5", r"num_gpus: 1\.5 is neither"),
        ("settings = { port = 1 }", r"settings: port follow"),
        ("settings = { modle = 'x' }", r"modle"),
        ("settings = { block_size = 0 }", r"block_size"),
        ("[[pools]]\nname = 't'\nrole = 'draft'", r"two pools have one name"),
        ("replicas = ", r"fleet\.toml"),
    ],
)
def test_bad_fleet_file_names_the_field(tmp_path: Path, body: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_fleet(write(tmp_path, body))


def test_pool_without_gpu_stays_on_the_cpu_unless_told() -> None:
    assert Pool(name="t", role="target").worker_settings().device == "cpu"
    assert Pool(name="t", role="target", num_gpus=1).worker_settings().device == "auto"
    assert Pool(name="t", role="target", settings={"device": "cuda:1"}).worker_settings().device == "cuda:1"


@pytest.mark.parametrize(
    ("expression", "value", "matches"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "b", True),
        ("!a", None, True),
        ("!a", "a", False),
        ("in(a,b)", "b", True),
        ("in(a, b)", "b", False),
        ("in(a,b)", "c", False),
        ("!in(a,b)", "a", False),
        ("!in(a,b)", None, True),
    ],
)
def test_label_selector_syntax(expression: str, value: str | None, matches: bool) -> None:
    assert label_matches(expression, value) is matches


def test_dead_nodes_offer_nothing() -> None:
    dead = {"Alive": False, "Labels": {"pool": "a"}, "Resources": {"CPU": 8.0}}
    pool = Pool(name="t", role="target", label_selector={"pool": "a"})
    assert "no node carries pool" in explain(pool, [dead], {})


def test_full_nodes_are_told_apart_from_small_ones() -> None:
    node = {"Alive": True, "Labels": {}, "Resources": {"CPU": 8.0, "GPU": 1.0}}
    pool = Pool(name="t", role="target", num_gpus=1)
    assert "GPU: 1 needed, 0.5 free" in explain(pool, [node], {"CPU": 8.0, "GPU": 0.5})
