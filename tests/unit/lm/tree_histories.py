"""Histories of an engine that is stepped by hand: streams that draft chains and trees, on too few blocks for all.

Every row of logits is compared with what a fresh model gives for the row's own text. What has occurred is counted.
"""

import random

from hypothesis import strategies as st

from outrider.lm.engine import Engine
from outrider.lm.interface import Forward
from outrider.lm.job import Job
from outrider.lm.tree import path_to

KINDS = (
    "trees", "grown", "kept", "moved", "kept_nothing", "cut_trees", "trees_with_prefix_hits", "trees_that_copied",
    "preempted_trees", "half_done_preempted_trees", "evicted_trees", "kept_when_evicted", "truncated_trees",
    "dropped_trees", "closed_trees", "evictions",
    "evicted_before_moved",
)  # fmt: skip
STATE_KINDS = (
    "states_of_trees",
    "states_of_prefix_hits",
    "states_of_kept_paths",
    "states_before_moves",
    "states_copied",
)
PARTIAL_KINDS = (
    "early", "early_again", "went_on", "went_on_in_part", "early_forgotten", "early_evicted", "early_preempted",
    "early_cut", "early_dropped", "early_recomputed", "early_beside_others", "early_before_trees", "skipping",
    "skipping_prefix_hits", "skipping_beside_others",
)  # fmt: skip
MAX_STREAMS = 7
NAMES = (
    "open", "ask_for_plain_rows", "ask_for_plain_rows", "ask_for_a_tree", "ask_for_a_tree", "ask_for_a_tree",
    "keep_a_path", "keep_a_path", "keep_a_path", "truncate", "step", "step", "step", "step", "drop", "close",
)  # fmt: skip
histories = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 2**32 - 1)), min_size=60, max_size=150)
"""Names of methods of `History`, each with a seed for what it draws."""
partial_histories = st.lists(
    st.tuples(st.sampled_from((*NAMES, *["ask_for_early_rows"] * 5, "ask_for_plain_rows")), st.integers(0, 2**32 - 1)),
    min_size=60,
    max_size=150,
)
"""As `histories`, with early rows, for models that have an exit layer."""


class Answer:
    """Stands for a future."""

    def __init__(self):
        self.result = self.error = None
        self.is_done = False

    def done(self):
        return self.is_done

    def set_result(self, result):
        self.result, self.is_done = result, True

    def set_exception(self, error):
        self.error, self.is_done = error, True


class Loop:
    """Stands for an event loop: calls at once."""

    def create_future(self):
        return Answer()

    def call_soon_threadsafe(self, callback, *args):
        callback(*args)


class Stream:
    """A sequence, what its tokens should be, and the job it waits for."""

    def __init__(self, sequence, text):
        self.sequence, self.text = sequence, text
        self.ids, self.parents = [], ()
        self.job = None
        self.early = []

    @property
    def num_plain(self):
        """Tokens that are not the tree's."""
        return len(self.ids) - len(self.parents)

    def text_of(self, place):
        """Ids up to the token at `place`, along its own path."""
        start = self.num_plain
        if place < start:
            return self.ids[: place + 1]
        return self.ids[:start] + [self.ids[start + n] for n in path_to(self.parents, place - start)]


class History:
    """check(text, logits): float32[vocab_size] after `text`; counts: a Counter of `KINDS`.

    check_states(text, row): the kept `states` of the last token of `text`; counted as `STATE_KINDS`.
    check_early(text, row): the state before the exit layer `exit_layer`, of a token of an early forward.
    check_skipping(text, logits): of a sequence that skips layers, where some do; counted as `PARTIAL_KINDS`.
    """

    def __init__(self, model, check, counts, seed, check_states=None, states=(), check_early=None, check_skipping=None):
        rng = random.Random(seed)
        self.check, self.counts, self.vocab_size = check, counts, model.vocab_size
        self.check_states, self.states = check_states, states
        self.check_early, self.check_skipping = check_early, check_skipping
        self.exit_layer = getattr(model, "exit_layer", 0)
        if states:
            model.keep_features(states)
        self.texts = [[rng.randrange(self.vocab_size) for _ in range(80)] for _ in range(2)]
        self.engine = Engine(
            model,
            num_blocks=rng.choice([10, 11, 12, 30]),
            block_size=4,
            max_batch_tokens=rng.choice([5, 9, 24]),
            max_waiting_sessions=0,
            overcommit=100.0,
            idle_grace_s=rng.choice([0.0, 0.0, 1e9]),
        )
        self.batches, forward = [], self.engine._forward
        self.engine._forward = lambda batch: self.batches.append(batch) or forward(batch)
        self.streams = []
        self.loop = Loop()
        self.count_evictions()

    def run(self, history):
        """Then all streams are closed, and all blocks are free."""
        for name, seed in history:
            getattr(self, name)(random.Random(seed))
        while self.streams:
            self.close(random.Random(0))
        stats = self.engine.stats()
        assert (stats.num_free_blocks, stats.num_sequences) == (stats.num_blocks, 0)
        self.engine.check_integrity([])

    def count_evictions(self):
        placement, evict, counts = self.engine._placement, self.engine._placement._evict, self.counts

        def counted(sequence):
            job = sequence.pending
            if job is not None and job.tree:
                counts["preempted_trees"] += 1
                counts["half_done_preempted_trees"] += job.tree_start < sequence.num_computed < job.total
            if sequence.early_ids:
                counts["early_preempted" if job is not None and job.is_early else "early_evicted"] += 1
            counts["evicted_trees"] += job is None and bool(sequence.parents)
            counts["evicted_before_moved"] += bool(sequence.moves)
            evict(sequence)

        placement._evict = counted

    def stream(self, rng, *, idle=True, tree=None):
        """One of the streams that are such, if any."""
        fitting = [s for s in self.streams if (s.job is None) == idle and tree in (None, bool(s.parents))]
        return rng.choice(fitting) if fitting else None

    def more_of_the_text(self, stream, count):
        """Ids to go on with, as many as there is room for: those of a common text, as long as it has been one."""
        start = len(stream.ids) if stream.ids == stream.text[: len(stream.ids)] else 40
        return stream.text[start : start + min(count, stream.sequence.max_length - len(stream.ids))]

    def ask(self, stream, ids, num_logits, parents=()):
        before, check = len(stream.ids), self.check_skipping if stream.sequence.skips else self.check
        self.counts["early_before_trees"] += bool(parents) and bool(stream.early) and ids[:1] == stream.early[:1]
        stream.early = []
        stream.ids, stream.parents = [*stream.ids, *ids], (*stream.parents, *parents)

        def program():
            stream.sequence.committed_length = stream.num_plain
            result = yield Forward(stream.sequence, ids, num_logits, parents)
            assert (stream.sequence.token_ids, stream.sequence.parents) == (stream.ids, stream.parents)
            assert len(result.logits) == num_logits
            for row, place in enumerate(range(len(stream.ids) - num_logits, len(stream.ids))):
                check(stream.text_of(place), result.logits[row])
            self.counts["trees_with_prefix_hits"] += bool(parents) and result.num_cached_tokens > 0
            assert result.num_cached_tokens <= max(0, stream.num_plain - before)
            self.counts["states_of_trees"] += bool(parents and self.states)
            self.counts["states_of_prefix_hits"] += bool(result.num_cached_tokens and self.states)
            self.counts["states_copied"] += bool(self.engine._cache.num_copied_blocks and self.states)
            self.counts["skipping"] += stream.sequence.skips
            self.counts["skipping_prefix_hits"] += stream.sequence.skips and result.num_cached_tokens > 0
            self.read_states(stream)

        stream.job = Job(program(), self.loop)
        self.engine._start_job(stream.job)

    def read_states(self, stream):
        """Of all tokens that are in the cache; no forward is pending."""
        if self.states and not stream.sequence.skips:
            rows = stream.sequence.features(0, stream.sequence.num_computed, self.states)
            assert len(rows) == stream.sequence.num_computed
            for place, row in enumerate(rows):
                self.check_states(stream.text_of(place), row)

    # What may happen, each drawn from its own seed.

    def open(self, rng):
        if len(self.streams) == MAX_STREAMS:
            return
        try:
            max_length, priority = rng.randint(12, 40), rng.choice([0, 0, 1])
            skips = self.check_skipping is not None and rng.random() < 0.4
            self.engine.open_sequence(max_length, priority=priority, skips=skips).send(None)
        except StopIteration as stop:
            self.streams.append(Stream(stop.value, rng.choice(self.texts)))

    def ask_for_plain_rows(self, rng):
        stream = self.stream(rng, tree=False)
        if stream and (ids := self.more_of_the_text(stream, rng.randint(1, rng.choice([4, 20])))):
            self.ask(stream, ids, rng.choice([1, len(ids)]))

    def ask_for_early_rows(self, rng):
        stream = self.stream(rng, tree=False)
        if stream is None or stream.sequence.skips:
            return
        sequence, start = stream.sequence, len(stream.ids) + len(stream.early)
        count = min(rng.choice([1, 1, 2, 9, 20]), sequence.max_length - start)
        ids = [i if rng.random() < 0.8 else rng.randrange(self.vocab_size) for i in stream.text[start : start + count]]
        if not ids:
            return
        self.counts["early_again"] += bool(stream.early)
        stream.early = [*stream.early, *ids]

        def program():
            sequence.committed_length = len(stream.ids) + rng.choice([0, 1])
            result = yield Forward(sequence, ids, 0, num_layers=self.exit_layer)
            assert len(result.logits) == 0
            assert (sequence.token_ids, sequence.early_ids) == (stream.ids, stream.early)
            rows = sequence.features(len(stream.ids), len(stream.ids) + len(stream.early), (self.exit_layer,))
            for number, row in enumerate(rows):
                self.check_early(stream.ids + stream.early[: number + 1], row)
            self.counts["early"] += 1
            self.read_states(stream)

        stream.job = Job(program(), self.loop)
        self.engine._start_job(stream.job)

    def ask_for_a_tree(self, rng):
        stream = self.stream(rng)
        if stream is None:
            return
        plain = [] if stream.parents else self.more_of_the_text(stream, rng.choice([0, 1, 1, 8, 9, 12]))
        room = stream.sequence.max_length - len(stream.ids) - len(plain)
        start = len(stream.parents)
        reach = rng.choice([1, 3, 20])
        parents = tuple(
            max(-1, rng.randint(i - reach, i) - 1) for i in range(start, start + min(room, rng.randint(1, 12)))
        )
        if parents:
            self.counts["trees"] += 1
            self.counts["grown"] += start > 0
            ids = plain + self.nodes(rng, stream, len(plain), parents)
            self.ask(stream, ids, rng.choice([min(len(parents) + 1, len(ids)), len(ids), 1]), parents)

    def nodes(self, rng, stream, num_plain, parents):
        """Ids for a tree's next nodes, some of which go on with the text."""
        whole = (*stream.parents, *parents)
        start = len(stream.ids) - len(stream.parents) + num_plain
        depths = [len(path_to(whole, node)) for node in range(len(stream.parents), len(whole))]
        drawn = [rng.randrange(self.vocab_size) for _ in parents]
        return [stream.text[start + d - 1] if rng.random() < 0.6 else i for d, i in zip(depths, drawn, strict=True)]

    def keep_a_path(self, rng):
        stream = self.stream(rng, tree=True)
        if stream is None:
            return
        path = path_to(stream.parents, rng.randint(-1, len(stream.parents) - 1))
        start, sequence, counts = stream.num_plain, stream.sequence, self.counts
        counts["kept" if path else "kept_nothing"] += 1
        counts["kept_when_evicted"] += bool(path) and not sequence.num_computed
        stream.ids[start:] = [stream.ids[start + n] for n in path]
        stream.parents = ()
        sequence.keep_path(path)
        assert (sequence.token_ids, sequence.parents) == (stream.ids, ())
        counts["moved"] += bool(sequence.moves)
        counts["states_of_kept_paths"] += bool(path and sequence.num_computed and self.states)
        counts["states_before_moves"] += bool(sequence.moves and self.states)
        self.read_states(stream)
        sequence.committed_length = len(stream.ids)
        if rng.random() < 0.2 and (ids := self.more_of_the_text(stream, 1)):
            self.ask(stream, ids, 1)

    def truncate(self, rng):
        stream = self.stream(rng)
        if stream:
            start, length = stream.num_plain, max(0, len(stream.ids) - rng.randint(1, 8))
            self.counts["truncated_trees"] += start < length
            stream.ids, stream.parents = stream.ids[:length], stream.parents[: max(0, length - start)]
            self.counts["early_forgotten"] += bool(stream.early)
            stream.early = []
            stream.sequence.truncate(length)
            assert (stream.sequence.token_ids, stream.sequence.parents) == (stream.ids, stream.parents)

    def step(self, rng):
        """What is ready gets its blocks, and none to six passes."""
        engine, counts = self.engine, self.counts
        engine._take_arrivals()
        for _ in range(rng.randint(0, 6) + 1):
            num_copied, num_evictions = engine._cache.num_copied_blocks, engine._cache._pool.num_evictions
            engine._placement.place()
            trees = [s.job for s in self.streams if s.job is not None and s.job.tree]
            counts["trees_that_copied"] += bool(trees) and engine._cache.num_copied_blocks > num_copied
            counts["evictions"] += engine._cache._pool.num_evictions > num_evictions
            half_done = [j for j in trees if j.num_rows_done and j.tree_start < j.sequence.num_computed < j.total]
            counts["cut_trees"] += bool(half_done)
            early = [s.job for s in self.streams if s.job is not None and s.job.is_early and not s.job.finished]
            counts["early_cut"] += any(0 < j.num_rows_done < j.num_rows for j in early)
            if engine._queue and rng.random() < 0.8:
                engine._step()
                self.count_partial(self.batches.pop() if self.batches else None)
        self.collect()

    def count_partial(self, batch):
        """What the engine's last pass held."""
        segments, counts = batch.segments if batch is not None else (), self.counts
        assert all(s.token_ids for s in segments)
        for kind in ("went_on", "went_on_in_part", "early_recomputed", "early_beside_others", "skipping_beside_others"):
            counts[kind] += 0
        counts["went_on"] += any(s.num_kept for s in segments)
        counts["went_on_in_part"] += any(0 < s.num_kept < len(s.token_ids) for s in segments)
        counts["early_recomputed"] += any(0 < s.num_early < len(s.token_ids) for s in segments)
        counts["early_beside_others"] += len({bool(s.num_early) for s in segments}) > 1
        counts["skipping_beside_others"] += len({s.skips for s in segments}) > 1

    def collect(self):
        for stream in self.streams:
            if stream.job is not None and stream.job.finished:
                if stream.job.future.error is not None:
                    raise stream.job.future.error
                stream.job = None
        self.engine.check_integrity([s.sequence for s in self.streams])

    def drop(self, rng):
        """Its caller went away; what was computed until then stays."""
        stream = self.stream(rng, idle=False)
        if stream is not None and not stream.job.finished:
            self.counts["dropped_trees"] += bool(stream.job.tree)
            self.counts["early_dropped"] += stream.job.is_early
            self.engine._drop(stream.job, None)
            stream.job = None
            num_early = len(stream.sequence.early_ids)
            assert stream.sequence.early_ids == stream.early[:num_early]
            stream.early = stream.early[:num_early]
            length, start = len(stream.sequence.token_ids), stream.num_plain
            assert stream.sequence.token_ids == stream.ids[:length]
            stream.ids, stream.parents = stream.ids[:length], stream.parents[: max(0, length - start)]
            assert stream.sequence.parents == stream.parents

    def close(self, rng):
        if self.streams:
            stream = self.streams.pop(rng.randrange(len(self.streams)))
            self.counts["closed_trees"] += bool(stream.parents)
            self.engine.close_sequence(stream.sequence)
            self.engine._take_arrivals()
