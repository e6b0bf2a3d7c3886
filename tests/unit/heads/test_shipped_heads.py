"""Heads that come with the package: found by name, small, documented, made for the model they go with and no other."""

import dataclasses
import json

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait
from outrider.drafts import TARGETS, head_folder, heads_of
from outrider.errors import InvalidArgument
from outrider.lm.bundle import BUNDLES
from outrider.lm.heads import HeadTarget, load_head
from outrider.lm.loading import load_model
from outrider.settings import TargetWorkerSettings

MAX_BYTES = 25_000_000


def test_they_are_found_by_name_and_by_target() -> None:
    assert TARGETS
    for name, target in TARGETS.items():
        assert target in BUNDLES
        folder = head_folder(name)
        assert folder is not None
        assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors"}
    assert heads_of("smollm2-135m") == ("smollm2-135m-eagle3",)
    assert heads_of("some/model") == ()
    assert head_folder("no-such-head") is None
    assert head_folder("../lm") is None


@pytest.mark.parametrize("name", TARGETS)
def test_they_are_small_and_say_how_they_were_made(name: str) -> None:
    folder = head_folder(name)
    assert folder is not None
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MAX_BYTES
    text = (folder / "README.md").read_text()
    assert "Apache-2.0" in text
    assert "outrider distill --model smollm2-135m" in text
    about = json.loads((folder / "config.json").read_text())["outrider"]
    assert f"--seed {about['seed']}" in text
    assert f"{about['trained_steps']:,} training steps" in text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TARGETS)
def test_they_fit_their_own_target_and_no_other(name: str, dtype: str) -> None:
    settings = TargetWorkerSettings(model=TARGETS[name], dtype=dtype, num_threads=1)  # type: ignore[arg-type]
    loaded = load_model(settings)
    about = loaded.description
    target = HeadTarget.of(
        loaded.model.causal_lm,  # type: ignore[attr-defined]
        name=about.model,
        vocab_size=about.vocab_size,
        fingerprint=about.model_fingerprint,
    )
    folder = head_folder(name)
    assert folder is not None
    assert load_head(folder, target, dtype=target.dtype).kind == "eagle3"
    other = dataclasses.replace(target, name="another", fingerprint="0" * 64)
    with pytest.raises(InvalidArgument, match=rf"{name}: this head was trained for .*, whose weights are not those"):
        load_head(folder, other, dtype=target.dtype)
