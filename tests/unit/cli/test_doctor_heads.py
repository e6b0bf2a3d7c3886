"""Heads as `outrider doctor` sees them."""

import json

import pytest
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.cli.doctor_heads import check_heads

torch = pytest.importorskip("torch")

import tiny_heads  # noqa: E402


def test_heads_that_need_no_reading():
    run = CliRunner().invoke(app, ["doctor", "--target=toy:vocab=16", "--heads=toy:agreement=0.8,skip:1", "--json"])
    checks = {check["name"]: check for check in json.loads(run.stdout)["checks"]}
    assert run.exit_code == 0
    assert "SIMULATED" in checks["head toy:agreement=0.8"]["detail"]
    assert "tried when its worker starts" in checks["head skip:1"]["detail"]
    (wrong,) = check_heads("toy:vocab=16", ["smollm2-135m-eagle3"])
    assert (wrong.state, bool(wrong.fix)) == ("fail", True)
    (wrong,) = check_heads("smollm2-135m", ["toy:agreement=1"])
    assert wrong.state == "fail"


def test_trained_heads_are_read_and_fit_or_say_why_not(tmp_path):
    target = tiny_heads.write_target(tmp_path / "target")
    heads = [
        tiny_heads.write_eagle(tmp_path / "eagle"),
        f"far={tiny_heads.write_eagle3(tmp_path / 'eagle3', target)}",
        tiny_heads.write_medusa(tmp_path / "medusa", target),
        tmp_path / "nowhere",
    ]
    eagle, eagle3, medusa, missing = check_heads(str(target), list(map(str, heads)))
    assert (eagle.state, medusa.state, missing.state) == ("ok", "ok", "fail")
    assert "reads states -1" in eagle.detail
    assert "beside its target only" in medusa.detail
    assert "no file or folder" in missing.detail
    assert (eagle3.state, eagle3.name) == ("ok", f"head {tmp_path / 'eagle3'}")
    assert missing.detail.startswith("head: "), "heads is a setting of target workers alone"
    config = json.loads((tmp_path / "eagle3" / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 4]  # inputs to one reader, outputs to another
    (tmp_path / "eagle3" / "config.json").write_text(json.dumps(config))
    (open_to_two,) = check_heads(str(target), [str(tmp_path / "eagle3")])
    assert open_to_two.state == "warn"
    assert "--head-states" in open_to_two.fix
