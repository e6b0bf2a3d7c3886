"""Settings of a checkpoint and its cache do what they say, or are refused by their name."""

import subprocess
import sys

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from tiny_checkpoints import change_config, save_tiny  # noqa: E402
from tiny_models import stock_logits, tiny  # noqa: E402

from outrider.errors import InvalidArgument  # noqa: E402
from outrider.lm import build  # noqa: E402
from outrider.lm.build import build_engine  # noqa: E402
from outrider.lm.interface import PackedBatch, Segment  # noqa: E402
from outrider.lm.loading import load_model  # noqa: E402
from outrider.settings import DraftWorkerSettings, TargetWorkerSettings, WorkerSettings  # noqa: E402

COMMIT = "0123456789abcdef0123456789abcdef01234567"
IDS = [(7 * i * i + 3) % 90 for i in range(20)]
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    save_tiny(path)
    return path


def settings(model, **extra):
    return WorkerSettings(model=str(model), num_threads=1, **extra)


def first_logits(loaded):
    loaded.model.allocate_cache(4, 16)
    return loaded.model.forward(PackedBatch((Segment(0, IDS, [2, 0], len(IDS)),)))


# The hub, with a stand-in for its download.


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Calls of the download, which answers with a folder of the hub's cache."""
    import huggingface_hub

    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / COMMIT
    calls = []

    def download(hub_id, *, revision=None, allow_patterns=()):
        calls.append((hub_id, revision, set(allow_patterns)))
        if not snapshot.exists():
            save_tiny(snapshot)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_a_hub_id_tells_the_commit_that_is_used(hub):
    about = load_model(settings("someone/tiny")).description
    assert (about.model, about.versions["revision"]) == ("someone/tiny", COMMIT)
    assert hub[0][:2] == ("someone/tiny", None)
    assert "*.py" not in hub[0][2]
    load_model(settings("someone/tiny", revision="v1.0", trust_remote_code=True))
    assert hub[1][:2] == ("someone/tiny", "v1.0")
    assert "*.py" in hub[1][2]


def test_all_ranks_of_a_model_load_one_commit(hub, monkeypatch):
    from outrider.lm import ranks

    seen = []
    monkeypatch.setattr(ranks, "load_on_ranks", lambda settings, load: seen.append(settings.revision))
    load_model(TargetWorkerSettings(model="someone/tiny", tensor_parallel=2))
    assert seen == [COMMIT]


def test_a_revision_of_what_is_not_on_the_hub_is_refused(folder):
    for model in (str(folder), "smollm2-135m", "toy:vocab=16", "missing.gguf"):
        with pytest.raises(InvalidArgument, match="revision") as caught:
            load_model(settings(model, revision="v1.0"))
        assert caught.value.field == "revision"
    assert "revision" not in load_model(settings(folder)).description.versions


# Code that comes with a checkpoint.


@pytest.fixture
def own_code(tmp_path, monkeypatch):
    """A checkpoint whose model class is in a file beside it."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = tmp_path / "own"
    save_tiny(path)
    (path / "own.py").write_text(CODE)
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    change_config(path, model_type="own_llama", architectures=["OwnForCausalLM"], auto_map=auto_map)
    return path


def test_code_of_a_checkpoint_runs_only_when_asked_for(own_code):
    with pytest.raises(InvalidArgument, match="set trust_remote_code") as caught:
        load_model(settings(own_code))
    assert caught.value.field == "trust_remote_code"
    loaded = load_model(settings(own_code, trust_remote_code=True))
    assert abs(first_logits(loaded) - stock_logits(tiny("Llama"), IDS)[:, :90]).max() < 1e-4
    before = loaded.description.model_fingerprint
    (own_code / "own.py").write_text(CODE + "\n# another version\n")
    assert load_model(settings(own_code, trust_remote_code=True)).description.model_fingerprint != before


def test_code_that_is_not_needed_is_not_run(folder, tmp_path):
    save_tiny(tmp_path)
    (tmp_path / "own.py").write_text("raise SystemExit('this ran')")
    change_config(tmp_path, auto_map={"AutoModelForCausalLM": "own.OwnForCausalLM"})
    assert load_model(settings(tmp_path)).description.dtype == "float32"


# Models without keys and values.


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"model_type": "rwkv7"}, "'rwkv7'"),
        ({"model_type": "jamba"}, "'jamba'"),
        ({"model_type": "falcon_h1"}, "'falcon_h1'"),
        ({"model_type": "recurrent_gemma", "block_types": ["recurrent", "attention"]}, "layers of type recurrent"),
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
        ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}, "layers of type conv"),
        ({"model_type": "granitemoehybrid", "layers_block_type": ["mamba", "attention"]}, "layers of type mamba"),
        ({"model_type": "some_hybrid", "hybrid_override_pattern": "M-M*-"}, "layers of type mamba"),
        ({"model_type": "some_vision", "text_config": {"model_type": "qwen3_5_text"}}, "'qwen3_5_text'"),
    ],
)
def test_recurrent_models_are_refused_before_anything_is_read(config, words, folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    change_config(tmp_path, **config)
    with pytest.raises(InvalidArgument, match="Choose a model whose layers are all attention") as caught:
        load_model(settings(tmp_path))  # neither weights nor a tokenizer are there
    assert words in str(caught.value)
    assert caught.value.field == "model"


def test_a_worker_ends_at_start_with_the_model_named(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    change_config(tmp_path, model_type="mamba2")
    command = [sys.executable, "-m", "outrider.cli", "target-worker", f"--model={tmp_path}", "--port=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: --model (OUTRIDER_MODEL): model type 'mamba2' cannot be served" in done.stderr


# The cache.


@pytest.mark.parametrize("cls", [TargetWorkerSettings, DraftWorkerSettings])
def test_the_caches_number_type(cls, folder):
    def load(**extra):
        return load_model(cls(model=str(folder), num_threads=1, dtype="float32", **extra))

    plain, rounded = load(), load(kv_cache_dtype="bfloat16")
    assert rounded.model.bytes_per_block(16) * 2 == plain.model.bytes_per_block(16)
    assert "; cache float32;" in plain.description.numerics_fingerprint
    assert "; cache bfloat16;" in rounded.description.numerics_fingerprint
    assert build._cache_namespace(plain) != build._cache_namespace(rounded)
    assert plain.description.model_fingerprint == rounded.description.model_fingerprint
    assert load(kv_cache_dtype="float32").description == plain.description
    gap = abs(first_logits(plain) - first_logits(rounded)).max()
    assert 1e-3 < gap < 1


def test_exact_numerics_go_with_another_type_of_the_cache(folder):
    given = settings(folder, dtype="bfloat16", numerics="exact", kv_cache_dtype="float16")
    about = load_model(given).description
    assert about.numerics_fingerprint.count("; cache float16;") == 1
    assert "; numerics exact;" in about.numerics_fingerprint
    assert about.numerics.environment["cache"] == "float16"
    assert (about.numerics.mode, about.numerics.proven) == ("exact", True)


@pytest.mark.parametrize(
    ("model", "extra", "field", "words"),
    [
        ("folder", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "fp8 is not supported on cpu.* Use bfloat16"),
        ("toy:vocab=16", {"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype", "leave it auto"),
        ("toy:vocab=16", {"memory_fraction": 0.1}, "memory_fraction", "give kv_cache_bytes"),
        ("folder", {"memory_fraction": 0.1, "kv_cache_bytes": 1 << 20}, "memory_fraction", "give one"),
        ("folder", {"memory_fraction": 1e-12}, "memory_fraction", "raise memory_fraction"),
        ("folder", {"max_context_length": 257}, "max_context_length", "the model reaches 256"),
    ],
)
def test_what_does_not_go_together(model, extra, field, words, folder):
    given = settings(folder if model == "folder" else model, **extra)
    with pytest.raises(InvalidArgument, match=words) as caught:
        build_engine(load_model(given), given)
    assert caught.value.field == field


def test_the_cache_takes_its_share_of_what_is_free(folder, monkeypatch):
    given = settings(folder, memory_fraction=0.25)
    loaded = load_model(given)
    monkeypatch.setattr(loaded.model, "free_bytes", lambda: 1 << 22)
    assert build_engine(loaded, given).stats().num_blocks == (1 << 20) // loaded.model.bytes_per_block(16)
    monkeypatch.setattr(loaded.model, "free_bytes", lambda: 1 << 40)
    assert build._cache_bytes(loaded.model, settings(folder)) == build.MAX_DEFAULT_CACHE_BYTES
