"""Toys: known logits, read back through the block table; pairs by vocabulary and seed."""

import subprocess
import sys

import numpy as np
import pytest
from conftest import scaled

from outrider.errors import InvalidArgument
from outrider.lm.interface import PackedBatch, Segment
from outrider.lm.toy import ToyModel, ToySpec, load_toy, parse_toy


def test_parse_reads_all_keys_and_text_is_canonical():
    text = "toy:vocab=64,seed=1234567,agreement=0.8,order=3,scale=1.5,context=128,pass_ms=20,token_ms=0.5,eos=7"
    spec = parse_toy(text)
    assert (spec.vocab, spec.agreement, spec.seed, spec.pass_ms, spec.token_ms) == (64, 0.8, 1234567, 20.0, 0.5)
    assert (spec.context, spec.order, spec.scale, spec.eos) == (128, 3, 1.5, 7)
    assert parse_toy(spec.text()) == spec
    assert parse_toy("toy:") == ToySpec()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("toy:vocabulary=5", ["vocabulary", "known keys", "vocab", "agreement", "nan_after"]),
        ("toy:vocab=five", ["vocab", "int", "five"]),
        ("toy:vocab=1.5", ["vocab", "int"]),
        ("toy:vocab=4,vocab=4", ["twice"]),
        ("toy:vocab=1", ["at least 2"]),
        ("toy:agreement=1.2", ["agreement"]),
        ("toy:agreement=nan", ["agreement"]),
        ("toy:scale=0", ["scale"]),
        ("toy:pass_ms=-1", ["pass_ms"]),
        ("toy:vocab=8,eos=8", ["eos"]),
        ("vocab=8", ["toy:"]),
    ],
)
def test_bad_text_is_refused_by_name(text, words):
    with pytest.raises(InvalidArgument) as caught:
        parse_toy(text)
    assert all(word in str(caught.value) for word in words)


def test_a_pair_shares_the_target_table_and_agreement_is_the_correlation():
    target = ToyModel(parse_toy("toy:vocab=2000,seed=5"))
    for agreement in (0.0, 0.5, 0.9):
        draft = ToyModel(parse_toy(f"toy:vocab=2000,seed=5,agreement={agreement}"))
        pairs = [(target.logits_for(p), draft.logits_for(p)) for p in ([1, 2], [3, 4], [9, 9])]
        for p, q in pairs:
            assert abs(np.corrcoef(p, q)[0, 1] - agreement) < 0.09
            assert abs(q.std() - 2.0) < 0.2
    same = ToyModel(parse_toy("toy:vocab=2000,seed=5,agreement=1"))
    assert np.array_equal(same.logits_for([1, 2]), target.logits_for([1, 2]))
    other = ToyModel(parse_toy("toy:vocab=2000,seed=6"))
    assert abs(np.corrcoef(other.logits_for([1, 2]), target.logits_for([1, 2]))[0, 1]) < 0.1


def test_order_says_which_tokens_decide():
    two, whole = ToyModel(parse_toy("toy:order=2")), ToyModel(parse_toy("toy:order=0"))
    assert np.array_equal(two.logits_for([1, 2, 3]), two.logits_for([7, 2, 3]))
    assert not np.array_equal(two.logits_for([1, 2, 3]), two.logits_for([1, 7, 3]))
    assert not np.array_equal(whole.logits_for([1, 2, 3]), whole.logits_for([7, 2, 3]))


@pytest.mark.parametrize("seed", range(scaled(20, at_least=3)))
def test_forward_equals_the_table_through_any_block_table(seed):
    rng = np.random.default_rng(seed)
    model = ToyModel(parse_toy("toy:vocab=11,order=0"))
    model.allocate_cache(num_blocks=32, block_size=3)
    table = rng.permutation(32)[:12].tolist()
    ids: list[int] = []
    while len(ids) < 30:
        if ids and rng.random() < 0.3:
            del ids[int(rng.integers(0, len(ids))) :]
        new = rng.integers(0, 11, int(rng.integers(1, 6))).tolist()
        num_logits = int(rng.integers(0, len(new) + 1))
        logits = model.forward(PackedBatch((Segment(len(ids), new, table, num_logits),)))
        ids += new
        assert logits.dtype == np.float32
        expected = [model.logits_for(ids[:n]) for n in range(len(ids) - num_logits + 1, len(ids) + 1)]
        assert np.array_equal(logits, np.array(expected, np.float32).reshape(num_logits, 11))


def test_a_wrong_cache_changes_the_logits():
    model = ToyModel(parse_toy("toy:vocab=11"))
    model.allocate_cache(num_blocks=4, block_size=2)
    model.forward(PackedBatch((Segment(0, [1, 2, 3], [0, 1], 0),)))
    wrong_table = model.forward(PackedBatch((Segment(3, [4], [2, 1], 1), Segment(3, [4], [3, 2], 1))))
    assert np.array_equal(wrong_table[0], model.logits_for([3, 4]))
    assert not np.array_equal(wrong_table[1], model.logits_for([3, 4]))


def test_nan_after_is_a_fault_by_length():
    model = ToyModel(parse_toy("toy:nan_after=3"))
    model.allocate_cache(num_blocks=4, block_size=4)
    logits = model.forward(PackedBatch((Segment(0, [1, 2, 3, 4, 5], [0, 1], 5),)))
    assert np.isnan(logits).all(axis=1).tolist() == [False, False, False, True, True]


def test_the_description_says_simulated_and_pairs_by_vocabulary():
    a, b, c = (load_toy(f"toy:{t}").description for t in ("vocab=32,eos=3", "vocab=32,agreement=0.5", "vocab=33"))
    assert a.simulated
    assert a.tokenizer_json == b""
    assert a.eos_token_ids == (3,)
    assert b.eos_token_ids == ()
    assert a.tokenizer_fingerprint == b.tokenizer_fingerprint != c.tokenizer_fingerprint
    assert a.model_fingerprint != b.model_fingerprint


def test_toys_need_no_torch():
    code = (
        "import sys, outrider.lm.engine, outrider.lm.toy, outrider.lm.build, outrider.lm.loading as l;"
        "from outrider.settings import WorkerSettings as S; s = S(model='toy:vocab=8,context=64');"
        "loaded = l.load_model(s); outrider.lm.build.build_engine(loaded, s);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
