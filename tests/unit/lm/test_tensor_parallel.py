"""A model over two ranks, real processes and real sums: the text of one rank, even shares, an end for every failure."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from conftest import scaled
from stack import in_process_stack

import outrider.lm  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import tokenizers  # noqa: E402
import transformers  # noqa: E402
from tiny_models import FAMILIES, tiny  # noqa: E402

import outrider  # noqa: E402
from outrider.errors import InvalidArgument  # noqa: E402
from outrider.lm import tensor_parallel  # noqa: E402
from outrider.lm.interface import PackedBatch, Segment  # noqa: E402
from outrider.lm.loading import load_model  # noqa: E402
from outrider.lm.ranks import decode, encode  # noqa: E402
from outrider.lm.rounded_linears import weight_bytes  # noqa: E402
from outrider.settings import TargetWorkerSettings  # noqa: E402

pytestmark = pytest.mark.slow
PATIENCE_S = 100


def save(folder, family, **extra):
    kind, own = FAMILIES[family]
    tiny(kind, **own, **extra).save_pretrained(folder)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({chr(33 + i): i for i in range(97)}, []))
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="!").save_pretrained(folder)
    return folder


def settings(folder, **extra):
    return TargetWorkerSettings(model=str(folder), dtype="float32", num_threads=1, **extra)


def passes(model):
    """Logits of a prefill of two streams, of steps in company, of steps after a block was copied, of a tree, and of a
    step after one of its paths."""
    model.allocate_cache(8, 4)
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 97, 6).tolist(), rng.integers(0, 97, 3).tolist()
    rows = [model.forward(PackedBatch((Segment(0, first, [5, 2], 2), Segment(0, second, [1], 1)))).copy()]
    for step in range(5):
        token = int(rows[-1][0].argmax())
        table = [5, 2, 7]
        if step == 2:
            model.copy_block(2, 6)
        if step >= 2:
            table[1] = 6
        batch = PackedBatch((Segment(6 + step, [token], table, 1), Segment(3 + step, [step], [1, 3], 1)))
        rows.append(model.forward(batch).copy())
    rows.append(model.forward(PackedBatch((Segment(6, [9, 8, 7, 6], [5, 6, 7], 4, (-1, -1, 1, 1)),))).copy())
    model.move_slots([27, 29], [26, 27])
    rows.append(model.forward(PackedBatch((Segment(8, [5], [5, 6, 7], 1),))).copy())
    return np.concatenate(rows)


def states(model):
    """Kept ones of the slots that `passes` leaves written, and not copied to."""
    model.keep_features((1, -1))
    passes(model)
    return model.read_features([*range(8, 12), *range(20, 28), *range(4, 8)], (1, -1)).numpy()


@contextlib.contextmanager
def two_ranks(folder):
    lost = []
    from outrider.lm import checkpoint, loading, ranks

    given = settings(folder, tensor_parallel=2)

    def load():
        return checkpoint.load_checkpoint(folder, given, loading.context_length, "tiny", lambda text, fraction: None)

    loaded = ranks.load_on_ranks(given, load, on_lost=lost.append)
    try:
        yield loaded, lost
    finally:
        loaded.model.ranks.close()
    assert not any(psutil.pid_exists(pid) for pid in loaded.model.ranks.pids)


async def test_text_through_the_services_is_one_rank_s(tmp_path):
    """Speculative on two ranks against plain on one; greedy and COUPLED."""
    folder = save(tmp_path / "model", "llama")
    alone, draft = load_model(settings(folder)), load_model(settings(folder))
    requests = [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3, "acceptance": "coupled"}]
    texts, drafted = [], 0
    with two_ranks(folder) as (loaded, lost):
        for target, gamma in ((alone, 0), (loaded, 3)):
            async with (
                in_process_stack(target, draft, worker={"kv_cache_bytes": 1 << 22}) as stack,
                outrider.Client(stack.address) as client,
            ):
                common = {"max_tokens": 24, "ignore_eos": True, "num_speculative_tokens": gamma, "drafter": "model"}
                answers = await asyncio.gather(
                    *(client.complete([5, 9, n], **common, **request) for n in (1, 2) for request in requests)
                )
                texts.append([answer.token_ids for answer in answers])
                drafted += sum(answer.speculation.num_draft_tokens for answer in answers)
        assert lost == []
    assert texts[0] == texts[1]
    assert drafted > 0, "INCONCLUSIVE"


@pytest.mark.parametrize("family", ["qwen2", "qwen3"][: scaled(10, at_least=1)])
def test_logits_equal_one_rank_s_and_each_rank_holds_half(family, tmp_path):
    folder = save(tmp_path / "model", family, tie_word_embeddings=family != "qwen3")
    alone = load_model(settings(folder))
    expected = passes(alone.model)
    kept = states(alone.model)
    with two_ranks(folder) as (loaded, lost):
        actual = passes(loaded.model)
        assert np.allclose(states(loaded.model), kept, atol=1e-4)
        assert lost == []
    assert np.allclose(actual, expected, atol=1e-4)
    assert (actual.argmax(-1) == expected.argmax(-1)).all()
    assert loaded.description.weight_bytes <= 0.55 * alone.description.weight_bytes
    states_bytes = 4 * 2 * 32 * 4
    assert (loaded.model.bytes_per_block(4) - states_bytes) * 2 == alone.model.bytes_per_block(4) - states_bytes
    assert loaded.description.model_fingerprint == alone.description.model_fingerprint


def test_smollm_greedy_text_is_one_rank_s(monkeypatch):
    """float32, 3 key-value heads over 2 ranks, tied embedding and head."""
    lost = []
    monkeypatch.setattr("outrider.lm.ranks._end_process", lost.append)
    texts, num_bytes = [], []
    for num_ranks in (1, 2):
        loaded = load_model(settings("smollm2-135m", tensor_parallel=num_ranks))
        texts.append(greedy(loaded.model, [504, 3575, 282, 4649, 314], 20))
        num_bytes.append(loaded.description.weight_bytes)
    loaded.model.ranks.close()
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 5
    assert num_bytes[1] <= 0.55 * num_bytes[0]
    assert lost == []


def greedy(model, prompt_ids, num_tokens):
    model.allocate_cache(4, 16)
    rows, length, text = prompt_ids, 0, []
    for _ in range(num_tokens):
        logits = model.forward(PackedBatch((Segment(length, rows, [0, 1, 2, 3], 1),)))
        length += len(rows)
        rows = [int(logits[0].argmax())]
        text += rows
    return text


@pytest.mark.parametrize("tied", [False, True])
def test_shares_of_all_ranks_are_even_and_make_up_the_whole(tied, monkeypatch):
    """3 key-value heads over 2 ranks, as in SmolLM2-135M: they do not divide, the weights nearly do."""
    extra = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "intermediate_size": 200}
    whole = tiny("Llama", tie_word_embeddings=tied, **extra)
    monkeypatch.setattr(tensor_parallel.dist, "get_world_size", lambda: 2)
    shards = []
    for rank in range(2):
        monkeypatch.setattr(tensor_parallel.dist, "get_rank", lambda rank=rank: rank)
        shard = tiny("Llama", tie_word_embeddings=tied, **extra)
        tensor_parallel.shard_model(shard)
        assert weight_bytes(shard) <= 0.55 * weight_bytes(whole)
        shards.append(shard)

    def joined(path, dim):
        return torch.cat([shard.get_submodule(path).weight for shard in shards], dim)

    for layer in range(3):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            path = f"model.layers.{layer}.{name}"
            assert torch.equal(joined(path, 0), whole.get_submodule(path).weight)
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            path = f"model.layers.{layer}.{name}"
            assert torch.equal(joined(f"{path}.linear", 1), whole.get_submodule(path).weight)
    assert torch.equal(joined("model.embed_tokens", 0), whole.model.embed_tokens.weight)
    if not tied:
        assert torch.equal(joined("lm_head.linear", 0), whole.lm_head.weight)


def test_batches_arrive_as_they_were_sent():
    batch = PackedBatch(
        (Segment(5, [1, 2, 3], [9, 4], 2), Segment(0, [7], [], 0), Segment(1, [8, 9], [2], 1, (-1, -1)))
    )
    assert decode(encode(batch)) == batch
    assert decode(encode(PackedBatch(()))) == PackedBatch(())


def test_what_cannot_be_split_is_refused_and_no_rank_is_left(tmp_path):
    folder = save(tmp_path / "model", "llama")
    for extra, why in (
        ({"tensor_parallel": 3}, "tensor_parallel: the model has 2 key-value heads"),
        ({"tensor_parallel": 2, "numerics": "exact"}, "numerics=exact"),
        ({"tensor_parallel": 2, "device": "cuda"}, "device cpu"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            load_model(settings(folder, **extra))
        assert not [c for c in psutil.Process().children() if "outrider.lm.ranks" in " ".join(c.cmdline())]
    with pytest.raises(InvalidArgument, match="a toy has nothing to split"):
        load_model(TargetWorkerSettings(model="toy:vocab=8", tensor_parallel=2))


@contextlib.contextmanager
def worker(folder):
    """A real target worker over two ranks, and its other rank."""
    flags = ["--tensor-parallel=2", "--num-threads=1", "--dtype=float32", "--kv-cache-bytes=1000000", "--port=0"]
    command = [sys.executable, "-m", "outrider.cli", "target-worker", f"--model={folder}", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert "ready" in process.stdout.readline()
        (rank,) = [c for c in psutil.Process(process.pid).children() if "outrider.lm.ranks" in " ".join(c.cmdline())]
        yield process, rank
    finally:
        process.kill()
        process.communicate()


def test_a_killed_rank_ends_the_worker_with_an_error(tmp_path):
    with worker(save(tmp_path / "model", "llama")) as (process, rank):
        rank.kill()
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert "rank 1 of the tensor-parallel model ended with status -9" in errors


def test_a_worker_that_is_told_to_end_leaves_no_rank(tmp_path):
    with worker(save(tmp_path / "model", "llama")) as (process, rank):
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        rank.wait(PATIENCE_S)


def test_a_failed_pass_on_one_rank_is_told_and_not_waited_for_for_ever(tmp_path):
    """The other rank is gone in the midst of passes: the sum fails instead of hanging."""
    with two_ranks(save(tmp_path / "model", "llama")) as (loaded, lost):
        model = loaded.model
        model.allocate_cache(4, 4)
        row = PackedBatch((Segment(0, [1], [0], 1),))
        model.forward(row)
        psutil.Process(model.ranks.pids[0]).kill()
        started = time.monotonic()
        with pytest.raises((RuntimeError, OSError)):
            while time.monotonic() - started < PATIENCE_S:
                model.forward(row)
        assert any("call failed" in why for why in lost)
