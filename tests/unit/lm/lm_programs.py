"""Small programs that tests run on an engine."""

import contextlib
import itertools

from outrider.lm.engine import Engine
from outrider.lm.interface import Forward
from outrider.lm.toy import ToyModel, parse_toy


def toy_engine(
    text="toy:vocab=16,seed=3", *, num_blocks=64, block_size=4, max_batch_tokens=32, max_waiting_sessions=8, **kwargs
):
    """An engine over a toy, not started."""
    return Engine(
        ToyModel(parse_toy(text)),
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_tokens=max_batch_tokens,
        max_waiting_sessions=max_waiting_sessions,
        **kwargs,
    )


@contextlib.contextmanager
def started(engine):
    """Starts the engine, stops it at the end."""
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


async def punch_holes(engine):
    """Leaves free runs of 3 blocks at most, so that longer sequences are fragmented; gives the sequences between."""
    sequences = [await engine.open_sequence(1) for _ in range(engine.stats().num_blocks)]
    for sequence in sequences:
        assert engine._cache.reserve(sequence, 1) == 0
    held = sequences[3::4]
    for sequence in sequences:
        if sequence not in held:
            engine.close_sequence(sequence)
    return held


def is_fragmented(blocks):
    """Whether a block table is no run of neighbours."""
    return any(b - a != 1 for a, b in itertools.pairwise(blocks))


def greedy(sequence, prompt_ids, num_tokens):
    """Plain greedy decoding."""
    pending, out = list(prompt_ids), []
    while len(out) < num_tokens:
        result = yield Forward(sequence, pending)
        pending = [int(result.logits[-1].argmax())]
        out += pending
    return out


def score(sequence, token_ids, num_logits=None):
    """Logits of the last rows, copied."""
    result = yield Forward(sequence, token_ids, len(token_ids) if num_logits is None else num_logits)
    return result.logits.copy()


def greedy_text(model, prompt_ids, num_tokens):
    """What `greedy` must give, from the toy's table alone."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(int(model.logits_for(ids).argmax()))
    return ids[len(prompt_ids) :]
