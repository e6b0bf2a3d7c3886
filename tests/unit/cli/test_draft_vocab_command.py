"""`outrider draft-vocab` writes what a draft worker reads."""

import json

import pytest
import tokenizers
from typer.testing import CliRunner

from outrider.cli.app import app
from outrider.errors import InvalidArgument
from outrider.lm.draft_vocab import read_draft_vocab
from outrider.lm.fingerprint import tokenizer_fingerprint


@pytest.fixture
def model(tmp_path):
    """A folder with a tokenizer of letters: a is 0, b is 1, and so on."""
    folder = tmp_path / "model"
    folder.mkdir()
    inner = tokenizers.Tokenizer(tokenizers.models.BPE({chr(97 + i): i for i in range(26)}, []))
    inner.save(str(folder / "tokenizer.json"))
    return folder


def test_counts_texts_and_fills_up(model, tmp_path):
    (tmp_path / "one").write_text("zzzy")
    (tmp_path / "two").write_text("yxzz")
    output = tmp_path / "ids.json"
    flags = [f"--model={model}", "--size=4", f"--output={output}", "--json"]
    result = CliRunner().invoke(app, ["draft-vocab", str(tmp_path / "one"), str(tmp_path / "two"), *flags])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) | {"output": ""} == {
        "output": "", "ids": 4, "counted_tokens": 8, "covered_tokens": 8,
    }  # fmt: skip
    assert json.loads(output.read_text())["ids"] == [25, 24, 23, 0]
    fingerprint = tokenizer_fingerprint((model / "tokenizer.json").read_text())
    ids = read_draft_vocab(str(output), vocab_size=26, tokenizer_fingerprint=fingerprint)
    assert ids.tolist() == [0, 23, 24, 25]
    with pytest.raises(InvalidArgument, match="another tokenizer"):
        read_draft_vocab(str(output), vocab_size=26, tokenizer_fingerprint="other")


def test_what_is_missing_is_named(model, tmp_path):
    output = f"--output={tmp_path / 'ids.json'}"
    for args, why in (
        ([str(tmp_path / "absent"), f"--model={model}"], "texts: cannot read"),
        ([str(model / "tokenizer.json"), f"--model={tmp_path}"], "has no tokenizer.json"),
    ):
        result = CliRunner().invoke(app, ["draft-vocab", *args, output], env={"COLUMNS": "400"})
        assert result.exit_code != 0
        assert why in result.stderr
