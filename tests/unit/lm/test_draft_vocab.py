"""Lists of drafted ids: what a file may hold, and that a trimmed model's logits are the whole one's at those ids."""

import json

import numpy as np
import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

from tiny_models import stock_logits, tiny  # noqa: E402

from outrider.errors import InvalidArgument  # noqa: E402
from outrider.lm.adapter import TransformersModel  # noqa: E402
from outrider.lm.draft_vocab import (  # noqa: E402
    TrimmedModel,
    frequent_ids,
    read_draft_vocab,
    trim_head,
    write_draft_vocab,
)
from outrider.lm.interface import PackedBatch, Segment  # noqa: E402
from outrider.lm.loading import load_model  # noqa: E402
from outrider.settings import DraftWorkerSettings  # noqa: E402


def read(path, **extra):
    return read_draft_vocab(str(path), **{"vocab_size": 50, "tokenizer_fingerprint": "mine", **extra}).tolist()


def test_all_forms_of_a_list_and_the_kept_ids(tmp_path):
    path = tmp_path / "ids"
    for content in ("7\n3 # frequent\n\n# comment\n9\n", "[7, 3, 9]", '{"ids": [7, 3, 9]}'):
        path.write_text(content)
        assert read(path) == [3, 7, 9]
    assert read(path, kept={1, 9, 50}) == [1, 3, 7, 9]  # 50 is no id here
    write_draft_vocab(path, [4, 2], "mine")
    assert read(path) == [2, 4]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "holds no ids"),
        ("[]", "holds no ids"),
        ("[1, 50]", "entry 2 of .* is 50, the vocabulary has ids 0 to 49"),
        ("[-1]", "entry 1 of .* is -1"),
        ("[1, 2, 1]", "entry 3 of .* repeats id 1"),
        ("[1, true]", "entry 2 of .* is True, not a token id"),
        ("[1.5]", "not a token id"),
        ("1\ntwo\n", "entry 2 of .* is 'two', not a token id"),
        ("[1, 2", "is no JSON"),
        ('{"tokens": [1]}', "neither a list of ids"),
        ('{"ids": [1], "tokenizer_fingerprint": "other"}', "made for another tokenizer"),
    ],
)
def test_bad_lists_are_refused_with_the_place(tmp_path, content, why):
    path = tmp_path / "ids"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=f"draft_vocab: .*{why}") as error:
        read(path)
    assert error.value.field == "draft_vocab"


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InvalidArgument, match=r"draft_vocab: cannot read .*absent"):
        read(tmp_path / "absent")


def test_the_most_frequent_first_then_the_lowest():
    assert frequent_ids({5: 2, 9: 7, 4: 2}, 5, 20) == [9, 4, 5, 0, 1]
    assert frequent_ids({}, 30, 20) == list(range(20))


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_listed_ids_are_the_whole_head_s(tied):
    model, stock = (tiny("Llama", tie_word_embeddings=tied) for _ in range(2))
    ids = np.array([0, 3, 17, 44, 96])
    trim_head(model, ids)
    assert model.get_output_embeddings().weight.shape[0] == 5
    trimmed = TrimmedModel(TransformersModel(model, vocab_size=5, context_length=64), ids, 97)
    trimmed.allocate_cache(4, 8)
    tokens = [5, 90, 33, 12]  # ids outside the list are read like any other
    logits = trimmed.forward(PackedBatch((Segment(0, tokens, [1, 2], 2),)))
    expected = stock_logits(stock, tokens)[-2:]
    assert (logits.shape, logits.dtype) == ((2, 97), np.float32)
    assert np.allclose(logits[:, ids], expected[:, ids], atol=1e-4)
    assert np.all(np.isneginf(np.delete(logits, ids, axis=1)))


def test_a_toy_drafts_listed_ids_and_its_end_of_text(tmp_path):
    path = tmp_path / "ids"
    path.write_text("[1, 2]")
    toy = "toy:vocab=8,eos=5"
    whole, trimmed = (load_model(DraftWorkerSettings(model=toy, draft_vocab=v)).model for v in ("", str(path)))
    segment = PackedBatch((Segment(0, [3, 4], [0], 1),))
    for model in (whole, trimmed):
        model.allocate_cache(1, 8)
    expected, logits = whole.forward(segment)[0], trimmed.forward(segment)[0]
    assert np.flatnonzero(np.isfinite(logits)).tolist() == [1, 2, 5]
    assert np.array_equal(logits[[1, 2, 5]], expected[[1, 2, 5]])
    path.write_text(json.dumps([8]))
    with pytest.raises(InvalidArgument, match="ids 0 to 7"):
        load_model(DraftWorkerSettings(model=toy, draft_vocab=str(path)))
    with pytest.raises(InvalidArgument, match="weight_dtype: a toy has no weights"):
        load_model(DraftWorkerSettings(model=toy, weight_dtype="int8"))
