"""Static steps on a CPU, eagerly: the logits of the eager adapter and of stock transformers, whatever the batch."""

import logging
import random

import numpy as np
import pytest
from conftest import scaled

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import transformers  # noqa: E402

from outrider.lm.adapter import TransformersModel  # noqa: E402
from outrider.lm.gpu.buckets import ROW_BUCKETS, row_bucket, table_bucket  # noqa: E402
from outrider.lm.gpu.cache import PagedCache  # noqa: E402
from outrider.lm.gpu.choose import attention_factory  # noqa: E402
from outrider.lm.gpu.flashinfer import FlashInferAttention, fits  # noqa: E402
from outrider.lm.gpu.flex import FlexAttention  # noqa: E402
from outrider.lm.gpu.model import GpuModel, adapt  # noqa: E402
from outrider.lm.gpu.paged_attention import GatheredAttention  # noqa: E402
from outrider.lm.gpu.step_rows import StepRows, StepShape, fill, static_shape, wanted_rows  # noqa: E402
from outrider.lm.interface import PackedBatch, Segment  # noqa: E402

VOCAB, CONTEXT, BLOCK, NUM_BLOCKS = 61, 200, 4, 150
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen2_sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}),
}


def tiny_model(family="llama"):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    kind, extra = FAMILIES[family]
    shape = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**shape, **extra)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval().float()


def models(family="llama", **options):
    """(static, eager) over one and the same weights."""
    common = {"vocab_size": VOCAB, "context_length": CONTEXT}
    pair = (
        GpuModel(tiny_model(family), **common, **options),
        TransformersModel(tiny_model(family), **common),
    )
    for model in pair:
        model.allocate_cache(NUM_BLOCKS, BLOCK)
    return pair


def batches(rng, num_steps):
    """A random history of some sequences: decoding, verification, prefill, rejected tokens; blocks in any order."""
    free = list(range(NUM_BLOCKS))
    rng.shuffle(free)
    lengths = [0] * 6
    tables = [[free.pop() for _ in range(24)] for _ in lengths]
    for _ in range(num_steps):
        segments = []
        for index in rng.sample(range(6), rng.randint(1, 6)):
            length = lengths[index] = max(0, lengths[index] - rng.choice([0, 0, 1, 3]))
            count = min(rng.choice([1, 1, 4, 9, 30, 60]), 96 - length)
            if count > 0:
                ids = [rng.randrange(VOCAB) for _ in range(count)]
                segments.append(Segment(length, ids, tables[index], rng.choice([0, 1, count])))
                lengths[index] = length + count
        if segments:
            yield PackedBatch(tuple(segments))


@pytest.mark.parametrize("seed", range(scaled(20, at_least=2)))
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_static_steps_are_those_of_eager_passes(family, seed):
    static, eager = models(family)
    for batch in batches(random.Random(seed), 25):
        assert np.abs(static.forward(batch) - eager.forward(batch)).max(initial=0.0) < 1e-4
    assert static.num_static_passes > 5
    assert static.num_eager_passes > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_flex_gives_what_gathering_gives(family):
    flex, eager = models(family, attention="flex")
    for batch in batches(random.Random(4), scaled(40, at_least=8)):
        assert np.abs(flex.forward(batch) - eager.forward(batch)).max(initial=0.0) < 1e-4
    assert flex.num_static_passes > 2


def test_steps_come_in_few_shapes_and_count_their_filling():
    static, _ = models()
    tables = [list(range(20 * i, 20 * i + 20)) for i in range(6)]
    for count in (1, 2, 3, 5, 6):
        batch = PackedBatch(tuple(Segment(10, [1], tables[i], 1) for i in range(count)))
        before = static.num_rows_computed
        assert static.forward(batch).shape == (count, VOCAB)
        assert static.num_rows_computed - before == row_bucket(count)
    assert set(static._steps) == {StepShape(n, 16) for n in (1, 2, 4, 8)}


def test_what_goes_to_the_eager_path():
    table = list(range(60))
    assert static_shape(PackedBatch((Segment(0, [1] * 128, table, 1),)), BLOCK) == StepShape(128, 32)
    assert static_shape(PackedBatch((Segment(0, [1] * 129, table, 1),)), BLOCK) is None

    class Tree:
        num_cached_tokens, token_ids, block_table, num_logits, parents = 3, [1, 2], table, 2, (-1, -1)

    assert static_shape(PackedBatch((Tree(),)), BLOCK) is None
    assert [row_bucket(n) for n in (1, 3, 64, 65, 128, 129)] == [1, 4, 64, 128, 128, None]
    assert [table_bucket(n) for n in (1, 16, 17, 100)] == [16, 16, 32, 128]
    assert sorted(ROW_BUCKETS) == list(ROW_BUCKETS)


def test_filling_rows_touch_nobody():
    """Garbage in the scratch block, left by filling rows, never reaches a row that is asked for."""
    static, eager = models()
    table = list(range(24))
    for model in (static, eager):
        model.forward(PackedBatch((Segment(0, list(range(1, 30)), table, 0),)))
    for pages in (*static._pages.key_pages, *static._pages.value_pages):
        pages[static._pages.scratch_block] = 1e4
    batch = PackedBatch((Segment(29, [7], table, 1), Segment(0, [3, 4], [40], 2)))
    assert np.abs(static.forward(batch) - eager.forward(batch)).max() < 1e-4
    matrix = fill(batch, static_shape(batch, BLOCK), NUM_BLOCKS, BLOCK)
    assert matrix.shape == (4, 18)
    assert (matrix[3, 2:] == NUM_BLOCKS).all()
    assert wanted_rows(batch).tolist() == [0, 1, 2]


def test_too_short_a_table_is_an_error():
    with pytest.raises(ValueError, match="do not fit 1 blocks"):
        fill(PackedBatch((Segment(3, [1, 2], [0], 1),)), StepShape(2, 16), 9, BLOCK)


class Recording:
    """Stands for CUDA graphs: the run is recorded once, and played by running it again on the same matrix."""

    def __init__(self):
        self.num_captures = self.num_replays = 0

    def __call__(self, run):
        self.num_captures += 1
        output = run()
        recording = self

        class Graph:
            def replay(self):
                recording.num_replays += 1
                output.copy_(run())

        return Graph(), output


def test_a_captured_step_is_replayed_with_new_rows():
    capture = Recording()
    static, eager = models(capture=capture)
    table = list(range(20))
    for position in range(12):
        batch = PackedBatch((Segment(position, [position + 1], table, 1),))
        assert np.abs(static.forward(batch) - eager.forward(batch)).max() < 1e-4
    assert (capture.num_captures, capture.num_replays) == (1, 12)
    static.allocate_cache(NUM_BLOCKS, BLOCK)
    static.forward(PackedBatch((Segment(0, [1], table, 1),)))
    assert capture.num_captures == 2


def test_steps_can_be_captured_before_they_are_needed():
    capture = Recording()
    static, _ = models(capture=capture)
    static.warm_up([StepShape(1, 16), StepShape(4, 16)])
    assert capture.num_captures == 2
    static.forward(PackedBatch(tuple(Segment(0, [1], [i], 1) for i in range(3))))
    assert capture.num_captures == 2


def test_a_capture_that_fails_is_told_once_and_steps_run_eagerly(caplog):
    def fails(run):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    static, eager = models(capture=fails)
    with caplog.at_level(logging.WARNING, logger="outrider"):  # a server started before may have set another level
        for count in (1, 2, 4, 2, 1):
            batch = PackedBatch(tuple(Segment(0, [5], [i], 1) for i in range(count)))
            assert np.abs(static.forward(batch) - eager.forward(batch)).max() < 1e-4
    (record,) = caplog.records
    assert "operation not permitted when stream is capturing" in record.message
    assert "\nmore" not in record.message


def test_a_cpu_and_exact_numerics_get_the_eager_adapter():
    common = {"vocab_size": VOCAB, "context_length": CONTEXT}
    assert type(adapt(tiny_model(), **common)) is TransformersModel
    with pytest.raises(AssertionError, match="static steps"):
        GpuModel(tiny_model(), **common, exact=True)


def small_cache(dtype=torch.float32, width=64, read_dtype=None):
    cache = PagedCache([(2, width, width)], 30, BLOCK, dtype, torch.device("cpu"), read_dtype=read_dtype)
    for pages in (*cache.key_pages, *cache.value_pages):
        pages.normal_(generator=torch.Generator().manual_seed(1))
    return cache


def rows_of(shape):
    batch = PackedBatch((Segment(13, [1], [3, 9, 4, 1], 1), Segment(2, [1, 2], [7, 8], 2)))
    return fill(batch, shape, 30, BLOCK)


class WrapperByTheBook:
    """What FlashInfer's documentation says of its decode wrapper, computed by nothing but what it is told."""

    def __init__(self, workspace, layout, *, use_cuda_graph, use_tensor_cores, **buffers):
        assert layout == "NHD"
        assert use_cuda_graph
        assert buffers["paged_kv_indptr_buffer"].dtype == torch.int32
        self.buffers = buffers
        self.num_plans = 0

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *,
        window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type,
    ):  # fmt: skip
        assert len(indptr) == len(self.buffers["paged_kv_indptr_buffer"])
        assert len(indices) <= len(self.buffers["paged_kv_indices_buffer"])
        assert len(last_page_len) == len(self.buffers["paged_kv_last_page_len_buffer"])
        self.told = (indptr, indices, last_page_len, num_qo_heads // num_kv_heads, page_size)
        self.window_left, self.cap, self.scale = window_left, logits_soft_cap, sm_scale
        self.num_plans += 1

    def run(self, q, pages):
        indptr, indices, last, group, size = self.told
        out = torch.empty_like(q)
        for row in range(len(q)):
            own = indices[indptr[row] : indptr[row + 1]].long()
            length = (len(own) - 1) * size + int(last[row])
            keys, values = (p[own].flatten(0, 1)[:length].repeat_interleave(group, 1) for p in pages)
            if self.window_left >= 0:
                keys, values = keys[-self.window_left - 1 :], values[-self.window_left - 1 :]
            scores = torch.einsum("hd,thd->ht", q[row], keys) * self.scale
            if self.cap:
                scores = self.cap * torch.tanh(scores / self.cap)
            out[row] = torch.einsum("ht,thd->hd", scores.softmax(1), values)
        return out


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("kind", ["flashinfer", "flex"])
def test_all_kinds_of_paged_attention_agree(kind, window, softcap):
    cache, shape = small_cache(), StepShape(4, 16)
    matrix = rows_of(shape)
    rows = StepRows(torch.from_numpy(matrix))
    query = torch.randn(4, 6, 64, generator=torch.Generator().manual_seed(2))
    workspace = torch.zeros(8, dtype=torch.uint8)
    other = (
        FlexAttention(cache, compiled=False)
        if kind == "flex"
        else FlashInferAttention(cache, shape, WrapperByTheBook, workspace)
    )
    results = []
    for attention in (GatheredAttention(cache), other):
        attention.begin(matrix)
        attention.plan(rows)
        results.append(attention.attend(0, query, None, window, softcap))
    assert (results[0] - results[1])[:3].abs().max() < 1e-5  # the fourth row fills up
    assert all(torch.isfinite(r).all() for r in results)


def test_flashinfer_plans_every_step_with_every_wrapper():
    cache, shape = small_cache(), StepShape(4, 16)
    attention = FlashInferAttention(cache, shape, WrapperByTheBook, torch.zeros(8, dtype=torch.uint8))
    query = torch.randn(4, 6, 64)
    attention.begin(rows_of(shape))
    attention.attend(0, query, 0.1, None, None)
    attention.attend(0, query, 0.1, 5, None)
    attention.attend(0, query, 0.1, 5, None)
    attention.begin(rows_of(shape))
    assert [w.num_plans for w in attention._wrappers.values()] == [2, 2]


def test_which_attention_is_chosen():
    cpu = torch.device("cpu")
    assert attention_factory(small_cache(), cpu)(StepShape(1, 16)).name == "gathered"
    assert attention_factory(small_cache(), cpu, "flex")(StepShape(1, 16)).name == "flex"
    with pytest.raises(ValueError, match="none of auto, flashinfer, flex, gathered"):
        attention_factory(small_cache(), cpu, "other")
    with pytest.raises(ValueError, match="flashinfer is not installed"):
        attention_factory(small_cache(), cpu, "flashinfer")
    rounded = small_cache(torch.bfloat16, read_dtype=torch.float32)
    with pytest.raises(ValueError, match="one number type"):
        attention_factory(rounded, cpu, "flex")
    assert fits(small_cache(torch.bfloat16))
    assert not fits(small_cache(torch.bfloat16, width=80))
    assert not fits(small_cache())
    assert not fits(rounded)
