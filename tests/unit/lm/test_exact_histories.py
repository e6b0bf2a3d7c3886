"""numerics=exact through the whole engine: prefix hits, copied blocks, preemption and recomputation change no bit."""

import pytest
from conftest import scaled

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from lm_programs import started  # noqa: E402
from shared_histories import Histories  # noqa: E402
from test_exact_numerics import DTYPES, adapt, differing_rows, fresh  # noqa: E402
from tiny_models import VOCAB_SIZE  # noqa: E402

from outrider.lm.engine import Engine  # noqa: E402


@pytest.mark.parametrize("seed", range(scaled(10, at_least=1)))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen2_sliding"])
async def test_every_kind_of_event_leaves_every_bit_as_it_is(family, dtype, seed):
    adapted, alone = adapt(family, dtype), adapt(family, dtype)
    engine = Engine(
        adapted,
        num_blocks=30,
        block_size=4,
        max_batch_tokens=[24, 64][seed % 2],
        max_waiting_sessions=99,
        overcommit=3.0,
        idle_grace_s=0.0,
        prefill_rows=8,
    )
    seen = []
    histories = Histories(engine, VOCAB_SIZE, lambda *row: seen.append(row), seed)
    with started(engine):
        await histories.run(num_workers=10, num_sessions=2)
    for prefix, num_logits, logits in seen:
        assert differing_rows(logits, fresh(alone, prefix)[-num_logits:]) == 0
    assert len(seen) > 100
