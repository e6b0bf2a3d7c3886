"""The whole command on a toy: it improves on its start, goes on when killed, and leaves checkpoints others read."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from distill_toys import EOS, NUM_LAYERS, VOCAB_SIZE, quiet, toy_settings, write_prompts, write_target  # noqa: E402
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from outrider.cli.app import app  # noqa: E402
from outrider.distill.pipeline import distill  # noqa: E402
from outrider.errors import FailedPrecondition, InvalidArgument  # noqa: E402
from outrider.lm.draft_vocab import read_draft_vocab  # noqa: E402
from outrider.lm.interface import PackedBatch, Segment  # noqa: E402
from outrider.lm.loading import load_model  # noqa: E402
from outrider.settings import DraftWorkerSettings, TargetWorkerSettings  # noqa: E402


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """(folder of the target, prompts, where generated text is shared)."""
    base = tmp_path_factory.mktemp("distill")
    return write_target(base / "tiny"), write_prompts(base / "prompts.jsonl"), base


def settings(toys, out, **extra):
    target, prompts, _ = toys
    return toy_settings(model=str(target), prompts=str(prompts), out=str(out), **extra)


@pytest.fixture(scope="module")
def runs(toys):
    """Reports of both kinds, from one generation."""
    data = toys[2] / "data"
    return {
        kind: distill(settings(toys, toys[2] / kind, kind=kind, data=str(data)), quiet) for kind in ("eagle3", "model")
    }


@pytest.mark.parametrize("kind", ["eagle3", "model"])
@pytest.mark.parametrize("key", ["t0", "t1"])
def test_training_raises_acceptance_on_held_out_prompts(runs, kind, key):
    pair = runs[kind]["acceptance"]["held_out"][key]
    start, trained = pair["start"], pair["trained"]
    assert trained["num_tokens"] == start["num_tokens"] > 100
    assert trained["positions"][0] > start["positions"][0] + 0.05
    assert trained["mean_lengths"][2] > start["mean_lengths"][2] + 0.05
    assert all(1.0 <= length <= guesses + 2 for guesses, length in enumerate(trained["mean_lengths"]))


def test_the_report_tells_what_was_done(runs, toys):
    report = runs["eagle3"]
    assert report == json.loads((toys[2] / "eagle3" / "report.json").read_text())
    assert report["training"]["step"] == 100
    assert report["training"]["curve"][-1]["cross_entropy"] < report["training"]["curve"][0]["cross_entropy"]
    assert report["data"]["generated_tokens"] > 500
    covered = report["vocabulary"]["coverage"]["held_out"]["t0"]
    assert report["vocabulary"]["size"] == 48
    assert 0.3 < covered["tokens"] <= 1.0
    assert 0.3 < covered["mass"] <= 1.0


def test_the_head_has_the_public_layout_and_names_its_target(runs, toys):
    draft = toys[2] / "eagle3" / "draft"
    tensors = load_file(draft / "model.safetensors")
    size, width = 32, 48
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "fc.weight": (size, 3 * size),
        **{f"fc_norm.{i}.weight": (size,) for i in range(3)},
        "midlayer.self_attn.q_proj.weight": (size, 2 * size),
        "midlayer.self_attn.k_proj.weight": (size, 2 * size),
        "midlayer.self_attn.v_proj.weight": (size, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, size),
        "midlayer.mlp.gate_proj.weight": (width, size),
        "midlayer.mlp.up_proj.weight": (width, size),
        "midlayer.mlp.down_proj.weight": (size, width),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "norm.weight": (size,),
        "lm_head.weight": (48, size),
        "d2t": (48,),
        "t2d": (VOCAB_SIZE,),
    }
    ids = torch.arange(48) + tensors["d2t"]
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert ids.tolist() == torch.nonzero(tensors["t2d"])[:, 0].tolist()
    assert EOS in ids.tolist()
    config = json.loads((draft / "config.json").read_text())
    assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (48, VOCAB_SIZE, 1)
    assert config["fc_norm"] is True
    assert transformers.LlamaConfig.from_pretrained(draft).hidden_size == size
    served = load_model(TargetWorkerSettings(model=str(toys[0]), num_threads=1)).description
    assert config["outrider"]["target_fingerprints"][served.dtype] == served.model_fingerprint
    assert config["outrider"]["tokenizer_fingerprint"] == served.tokenizer_fingerprint
    assert config["outrider"]["state_layers"] == [2, NUM_LAYERS // 2, NUM_LAYERS - 3]
    with safe_open(draft / "model.safetensors", framework="pt") as file:
        assert file.metadata()["target_fingerprint"] == served.model_fingerprint


def test_the_small_model_loads_in_transformers_and_in_a_draft_worker(runs, toys):
    draft = toys[2] / "model" / "draft"
    stock, info = transformers.AutoModelForCausalLM.from_pretrained(draft, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert stock.config.num_hidden_layers == 2
    served = load_model(TargetWorkerSettings(model=str(toys[0]), num_threads=1)).description
    assert stock.config.outrider["target_fingerprints"][served.dtype] == served.model_fingerprint
    ids = read_draft_vocab(
        str(draft / "draft_vocab.json"),
        vocab_size=VOCAB_SIZE,
        tokenizer_fingerprint=served.tokenizer_fingerprint,
    )
    assert len(ids) == 48
    worker = DraftWorkerSettings(
        model=str(draft), draft_vocab=str(draft / "draft_vocab.json"), dtype="float32", num_threads=1
    )
    loaded = load_model(worker)
    assert loaded.description.tokenizer_fingerprint == served.tokenizer_fingerprint
    loaded.model.allocate_cache(4, 8)
    tokens = [5, 9, 1, 40]
    logits = loaded.model.forward(PackedBatch((Segment(0, tokens, [0], 1),)))[0]
    with torch.inference_mode():
        expected = stock.float()(input_ids=torch.tensor([tokens])).logits[0, -1].numpy()
    finite = np.flatnonzero(np.isfinite(logits))
    assert set(ids) <= set(finite.tolist())
    assert np.allclose(logits[finite], expected[finite], atol=1e-3)


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it."""


def kill_at(words):
    def on_progress(text, fraction):
        if words in text:
            raise Killed

    return on_progress


def test_a_killed_run_goes_on_and_ends_the_same(toys, tmp_path):
    """Killed while generating, after it, and halfway through the training; all files equal those of a run in one go."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    few = {"num_steps": 24, "checkpoint_interval_s": 0.0}
    expected = distill(settings(toys, whole, **few), quiet)
    stops = ["generated train-00000", "choosing the draft vocabulary", "training: step 12"]
    shards = []
    for stop in stops:
        with pytest.raises(Killed):
            distill(settings(toys, broken, **few), kill_at(stop))
        shards.append({p.name: p.stat().st_mtime_ns for p in (broken / "data").glob("train-*.json")})
    assert list(shards[0]) == ["train-00000.json"]
    assert len(shards[1]) > 1
    assert shards[1] == shards[2]
    assert shards[1]["train-00000.json"] == shards[0]["train-00000.json"]  # made once
    report = distill(settings(toys, broken, **few), quiet)
    assert report["training"]["resumed_from"] == [12]
    assert expected["training"]["resumed_from"] == []
    assert report["training"]["curve"] == expected["training"]["curve"]
    assert report["acceptance"] == expected["acceptance"]
    ours, theirs = (load_file(run / "draft" / "model.safetensors") for run in (broken, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert distill(settings(toys, broken, **few), kill_at("")) == report  # finished: nothing is done again


def test_the_same_command_goes_on_after_sigkill(runs, toys, tmp_path):
    """The real process, ended without warning while it trains."""
    given = settings(toys, tmp_path / "out", data=str(toys[2] / "data"), num_steps=3000, checkpoint_interval_s=0.0)
    command = [sys.executable, "-m", "outrider.cli", "distill", *to_flags(given)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not (tmp_path / "out" / "checkpoint.pt").is_file():
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.05)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    process.stderr.close()
    before = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)["step"]
    steps = []

    def kill_soon(text, fraction):
        if text.startswith("training: step"):
            steps.append(int(text.split()[2].rstrip(",")))
            if len(steps) == 3:
                raise Killed

    with pytest.raises(Killed):
        distill(given, kill_soon)
    assert steps == [before + 1, before + 2, before + 3]


def to_flags(given):
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.model_dump().items() if value != ""]


def test_a_folder_keeps_to_its_settings(runs, toys, tmp_path):
    data = str(toys[2] / "data")
    with pytest.raises(InvalidArgument, match=r"out: .*begun with seed 0, this is 1"):
        distill(settings(toys, toys[2] / "eagle3", data=data, seed=1), quiet)
    with pytest.raises(InvalidArgument, match=r"data: .*begun with max_new_tokens 20, this is 21"):
        distill(settings(toys, tmp_path / "other", data=data, max_new_tokens=21), quiet)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    with pytest.raises(InvalidArgument, match=r"out: .*holds other things"):
        distill(settings(toys, tmp_path / "full"), quiet)


def test_two_runs_in_one_folder_are_refused(toys, tmp_path):
    inner = {}

    def on_progress(text, fraction):
        if not inner:
            with pytest.raises(FailedPrecondition, match="another process"):
                distill(settings(toys, tmp_path / "out", num_steps=1), quiet)
            inner["refused"] = True
            raise Killed

    with pytest.raises(Killed):
        distill(settings(toys, tmp_path / "out", num_steps=1), on_progress)
    assert inner["refused"]


def test_the_command_prints_the_report_of_a_finished_run(runs, toys):
    given = settings(toys, toys[2] / "eagle3", data=str(toys[2] / "data"))
    flags = to_flags(given)
    shown = CliRunner().invoke(app, ["distill", *flags])
    assert shown.exit_code == 0, shown.output
    assert "trained" in shown.output
    assert "held_out" in shown.output
    as_json = CliRunner().invoke(app, ["distill", *flags, "--json"])
    assert json.loads(as_json.stdout)["training"]["step"] == 100


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "--out (OUTRIDER_OUT): give a folder"),
        (["--out=OUT", "--prompts=0"], "--prompts (OUTRIDER_PROMPTS): ask for at least 1"),
        (["--out=OUT", "--prompts=absent.jsonl"], "--prompts (OUTRIDER_PROMPTS): cannot read absent.jsonl"),
        (["--out=OUT", "--model=toy:vocab=8"], "a toy has no hidden states"),
        (["--out=OUT", "--minutes=-1"], "--minutes"),
        (["--out=OUT", "--no-such-flag"], "No such option"),
    ],
)
def test_bad_flags_are_usage_errors_by_name(tmp_path, flags, words):
    flags = [flag.replace("OUT", str(tmp_path / "out")) for flag in flags]
    result = CliRunner().invoke(app, ["distill", *flags])
    assert result.exit_code == 2
    assert words in result.output + (result.stderr if result.stderr_bytes else "")
