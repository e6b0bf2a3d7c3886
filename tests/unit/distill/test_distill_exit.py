"""Exit adapters: trained, written, read back, refused; and what one guesses at work against what it was trained to."""

import copy
import dataclasses
import json
import shutil

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from distill_toys import EOS, NUM_LAYERS, VOCAB_SIZE, quiet, toy_settings, write_prompts, write_target  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from outrider.distill.batches import Corpus  # noqa: E402
from outrider.distill.exit import ExitAdapter  # noqa: E402
from outrider.distill.generation import Job, generate  # noqa: E402
from outrider.distill.pipeline import distill  # noqa: E402
from outrider.distill.shards import Shard  # noqa: E402
from outrider.distill.target import Target  # noqa: E402
from outrider.errors import InvalidArgument  # noqa: E402
from outrider.lm.cpu_linear import pack_linears  # noqa: E402
from outrider.lm.exit_block import ExitHead, new_block  # noqa: E402
from outrider.lm.exit_head import ExitTarget, is_exit, load_exit  # noqa: E402
from outrider.lm.loading import load_model  # noqa: E402
from outrider.settings import TargetWorkerSettings  # noqa: E402

EXIT_LAYER = 1
PROMPTS = [[5, 9, 1], [7], [3, 3, 3, 40, 2, 8], [11, 12]]


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    base = tmp_path_factory.mktemp("exit")
    return write_target(base / "tiny"), write_prompts(base / "prompts.jsonl"), base


def settings(toys, out, **extra):
    target, prompts, _ = toys
    return toy_settings(model=str(target), prompts=str(prompts), out=str(out), kind="exit", **extra)


@pytest.fixture(scope="module")
def report(toys):
    return distill(settings(toys, toys[2] / "run", exit_layer=EXIT_LAYER), quiet)


@pytest.fixture
def draft(report, toys, tmp_path):
    """A copy of the trained adapter that a test may spoil."""
    return shutil.copytree(toys[2] / "run" / "draft", tmp_path / "draft")


@pytest.fixture(scope="module")
def stock(toys):
    return transformers.AutoModelForCausalLM.from_pretrained(toys[0], dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def exit_target(toys, stock):
    served = load_model(TargetWorkerSettings(model=str(toys[0]), num_threads=1)).description
    return ExitTarget.of(stock, model_fingerprint=served.model_fingerprint, vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_packed_head_are_read_back(stock, dtype):
    head = copy.deepcopy(stock.lm_head).to(dtype)
    packed = torch.nn.Sequential(copy.deepcopy(head))
    pack_linears(packed)
    target = ExitTarget(stock.config, "", VOCAB_SIZE, dtype, torch.device("cpu"), packed)
    assert torch.equal(target.head_rows(torch.tensor([3, 60, 5])), head.weight[[3, 60, 5]])


@pytest.mark.parametrize("key", ["t0", "t1"])
def test_training_raises_acceptance_on_held_out_prompts(report, key):
    pair = report["acceptance"]["held_out"][key]
    start, trained = pair["start"], pair["trained"]
    assert trained["num_tokens"] == start["num_tokens"] > 100
    assert trained["positions"][0] > start["positions"][0] + 0.05
    assert trained["mean_lengths"][2] > start["mean_lengths"][2] + 0.05
    assert report["training"]["step"] == 100


def test_only_block_and_norm_are_trained_and_written(report, toys, stock):
    draft = toys[2] / "run" / "draft"
    tensors = load_file(draft / "model.safetensors")
    own = {f"layers.0.{name}": tuple(p.shape) for name, p in stock.model.layers[0].named_parameters()}
    expected = own | {"norm.weight": (32,), "draft_ids": (48,)}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == expected
    assert report["num_parameters"] == sum(t.numel() for n, t in tensors.items() if n != "draft_ids")
    assert EOS in tensors["draft_ids"].tolist()
    about = json.loads((draft / "config.json").read_text())["outrider"]
    assert (about["kind"], about["exit_layer"]) == ("exit", EXIT_LAYER)
    assert is_exit(draft)
    assert not is_exit(toys[0])


@pytest.mark.parametrize("layer", [1, 2, 0])
def test_the_state_at_the_exit_is_the_input_of_that_layer(toys, stock, layer):
    """Layer 2 is one of the three states that are taken anyway; 0 stands for a fifth of the layers."""
    target = Target(settings(toys, "unused", exit_layer=layer), quiet)
    assert target.exit_layer == (layer or NUM_LAYERS // 5)
    assert target.num_states == (4 if target.exit_layer == 2 else 5)
    sequences, states = generate(target, [Job(i, p, 0.0) for i, p in enumerate(PROMPTS)], max_new_tokens=6, seed=0)
    for sequence, own in zip(sequences, states, strict=True):
        with torch.inference_mode():
            result = stock(input_ids=torch.tensor([sequence.token_ids]), output_hidden_states=True)
        expected = result.hidden_states[target.exit_layer][0]
        torch.testing.assert_close(own[:, target.exit_state], expected, atol=2e-4, rtol=1e-3)
        last = result.hidden_states[NUM_LAYERS][0]
        torch.testing.assert_close(own[:, 3], last, atol=2e-4, rtol=1e-3)


def check_context(head, states, expected):
    """In pieces, one by one and after being truncated."""
    context = head.new_context()
    for start, end in [(0, 3), (3, 4), (4, 9), (9, 10), (10, 11)]:
        torch.testing.assert_close(context.extend(states[start:end]), expected[end - 1], atol=1e-3, rtol=1e-3)
    context.truncate(6)
    torch.testing.assert_close(context.extend(states[6:10]), expected[9], atol=1e-3, rtol=1e-3)
    assert context.length == 10


def test_at_work_it_guesses_what_it_was_trained_to_however_its_context_came(toys, report, exit_target):
    draft = toys[2] / "run" / "draft"
    head = load_exit(draft, exit_target)
    target = Target(settings(toys, "unused", exit_layer=EXIT_LAYER), quiet)
    adapter = ExitAdapter(target.weights, head.draft_ids, EXIT_LAYER, target.exit_state)
    tensors = {name: t.float() for name, t in load_file(draft / "model.safetensors").items() if name != "draft_ids"}
    adapter.base.load_state_dict(tensors)
    sequences, states = generate(target, [Job(0, PROMPTS[2], 1.0)], max_new_tokens=14, seed=0)
    batch = Corpus([Shard(sequences, torch.cat(states), 0.0, {})]).batch([0])
    with torch.inference_mode():
        expected = adapter.lm_head(adapter.hidden(batch, 1)[0][0])
    check_context(head, states[0][:, target.exit_state], expected)


@pytest.mark.parametrize("family", ["Mistral", "Qwen3", "Qwen2"])
def test_blocks_of_other_families_with_windows_norms_and_biases(family):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    window = {"sliding_window": 4} if family == "Mistral" else {}
    config = getattr(transformers, f"{family}Config")(**sizes, **window, intermediate_size=48, num_hidden_layers=3)
    base = new_block(config, 1).eval()
    states = torch.randn(11, 32)
    rows = torch.nn.Linear(32, 5, bias=False)
    with torch.inference_mode():
        expected = rows(base(inputs_embeds=states[None], use_cache=False).last_hidden_state[0])
    check_context(ExitHead(base, rows, 1, torch.arange(5), {}), states, expected)


def test_wrong_targets_and_spoilt_files_are_refused_by_name(draft, exit_target):
    def refuses(words, **changed):
        with pytest.raises(InvalidArgument, match=words) as caught:
            load_exit(draft, dataclasses.replace(exit_target, **changed))
        assert caught.value.field == "heads"

    refuses("fingerprints .* this target's is 0123", model_fingerprint="0123")
    weights, config = draft / "model.safetensors", draft / "config.json"
    good = load_file(weights)
    key = "layers.0.mlp.up_proj.weight"
    save_file(good | {key: torch.zeros(5, 32)}, weights)
    refuses(rf"model\.safetensors: {key} has shape \(5, 32\), expected \(48, 32\)")
    save_file({n: t for n, t in good.items() if n != key}, weights)
    refuses(rf"model\.safetensors: {key} is missing, expected shape \(48, 32\)")
    save_file(good | {"fc.weight": torch.zeros(2)}, weights)
    refuses("fc.weight is not part of")
    save_file(good | {key: torch.full((48, 32), float("nan"))}, weights)
    refuses(f"{key} holds values that are no finite numbers")
    save_file(good | {"draft_ids": torch.tensor([3, 2])}, weights)
    refuses("draft_ids must be ascending ids below 64")
    save_file(good | {"draft_ids": torch.tensor([3, 64])}, weights)
    refuses("draft_ids must be ascending ids below 64")
    save_file(good | {"draft_ids": torch.tensor([3.0])}, weights)
    refuses("draft_ids is torch.float32")
    save_file(good, weights)
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    refuses("cannot read .*model.safetensors")
    weights.unlink()
    refuses("cannot read .*model.safetensors")
    content = json.loads(config.read_text())
    content["outrider"]["exit_layer"] = NUM_LAYERS
    config.write_text(json.dumps(content))
    refuses("exit_layer is 7, expected 1 to 6")
    content["outrider"]["kind"] = "eagle3"
    config.write_text(json.dumps(content))
    refuses('no "outrider" of kind "exit"')
    config.write_text("{")
    refuses("cannot read .*config.json")


def test_settings_of_the_exit(toys, report, tmp_path):
    with pytest.raises(InvalidArgument, match="exit_layer: 7 is no layer"):
        Target(settings(toys, "unused", exit_layer=NUM_LAYERS), quiet)
    with pytest.raises(InvalidArgument, match=r"out: .*begun with exit_layer 1, this is 2"):
        distill(settings(toys, toys[2] / "run", exit_layer=2), quiet)
    with pytest.raises(InvalidArgument, match=r"data: .*begun with exit_layer 1, this is None"):
        distill(settings(toys, tmp_path / "other", exit_layer=2, data=str(toys[2] / "run" / "data")), quiet)
