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
        ("replicas = 2\nmax_replicas = 1", r"replicas: 2 is not between min_replicas 2 and max_replicas 1"),
        ("replicas = 1\nmin_replicas = 2\nmax_replicas = 3", r"replicas: 1 is not between"),
        ("min_replicas = 0", r"pools\.0\.min_replicas"),
        ("num_gpus = 1\nsettings = { tensor_parallel = 2 }", r"num_gpus: 1, but the 2 ranks of tensor_parallel"),
        ("num_cpus = 0\nsettings = { tensor_parallel = 2 }", r"num_cpus: 0, with no card"),
        ("[scaling]\nmin_usage = 0.9", r"scaling: .*min_usage: must be below max_usage"),
        ("[scaling]\nmin_draft_wait = 0.5", r"min_draft_wait: must be below max_draft_wait"),
        ("[scaling]\nup_delay = 1", r"scaling\.up_delay: Extra"),
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


def test_coordinators_are_addresses_or_names(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text('coordinators = ["nowhere"]\n[[pools]]\nname = "t"\nrole = "target"\n')
    with pytest.raises(ConfigError, match="coordinators has 'nowhere'"):
        load_fleet(path)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, 1, 1)),
        ({"replicas": 3}, (3, 3, 3)),
        ({"replicas": 2, "max_replicas": 5}, (2, 2, 5)),
        ({"min_replicas": 2, "max_replicas": 5}, (2, 2, 5)),
        ({"min_replicas": 1, "replicas": 2, "max_replicas": 5}, (1, 2, 5)),
    ],
)
def test_bounds_that_are_not_given_follow_from_those_that_are(given: dict, expected: tuple) -> None:
    pool = Pool(name="t", role="target", **given)
    assert (pool.min_replicas, pool.replicas, pool.max_replicas) == expected
    assert pool.scales is (expected[0] < expected[2])


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


def test_a_kind_of_card_that_is_not_there_is_named_beside_those_that_are() -> None:
    node = {"Alive": True, "Labels": {}, "Resources": {"GPU": 1.0, "accelerator_type:L4": 1.0}}
    pool = Pool(name="t", role="target", num_cpus=0, num_gpus=1, accelerator_type="A100")
    assert "no matching node has an accelerator A100 (the cluster has L4)" in explain(pool, [node], {})
    assert "(no node has any)" in explain(pool, [{**node, "Resources": {"GPU": 1.0}}], {})
    fitting = pool.model_copy(update={"accelerator_type": "L4"})
    assert "GPU: 1 needed, 0 free" in explain(fitting, [node], {})


def test_what_no_node_has_at_once_is_told() -> None:
    nodes = [
        {"Alive": True, "Labels": {}, "Resources": {"CPU": 1.0, "GPU": 1.0}},
        {"Alive": True, "Labels": {}, "Resources": {"CPU": 64.0}},
    ]
    pool = Pool(name="t", role="target", num_cpus=4, num_gpus=1)
    assert explain(pool, nodes, {}) == "no matching node has all at once: CPU 4, GPU 1"


def test_full_nodes_are_told_apart_from_small_ones() -> None:
    node = {"Alive": True, "Labels": {}, "Resources": {"CPU": 8.0, "GPU": 1.0}}
    pool = Pool(name="t", role="target", num_gpus=1)
    full = "the matching nodes are full (GPU: 1 needed, 0.5 free in the whole cluster)"
    assert explain(pool, [node], {"CPU": 8.0, "GPU": 0.5}) == full
    assert "the cluster as a whole has enough" in explain(pool, [node], {"CPU": 8.0, "GPU": 1.0})
