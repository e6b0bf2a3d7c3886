"""What `outrider distill --kind eagle3` trains and writes is read back and computes the same."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from head_checkpoints import random
from transformers import LlamaConfig

from outrider.distill.batches import Batch
from outrider.distill.eagle3 import Eagle3Head
from outrider.distill.export import export_eagle3, provenance
from outrider.distill.target import TargetWeights
from outrider.errors import InvalidArgument
from outrider.lm.heads import EagleHead, HeadTarget, load_head

V, H = 60, 32
IDS = torch.tensor([0, 3, 4, 9, 17, 30, 44, 59])


def distilled(folder: Path, num_layers: int = 5) -> tuple[Eagle3Head, HeadTarget, TargetWeights]:
    config = LlamaConfig(
        hidden_size=H,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=num_layers,
        vocab_size=V,
    )
    weights = TargetWeights(config, random(V, H, seed=1), random(V, H, seed=2), torch.ones(H), {})
    torch.manual_seed(3)
    head = Eagle3Head(weights, IDS)
    for value in head.parameters():  # as the file will hold them
        value.data = (value.data + 0.1 * torch.randn_like(value)).bfloat16().float()
    about: Any = SimpleNamespace(
        name="tiny",
        fingerprints={"float32": "abc", "bfloat16": "def"},
        tokenizer_fingerprint="tok",
        dtype=torch.float32,
        weights=weights,
        state_layers=(1, 2, 4),
        num_layers=num_layers,
        context_length=64,
    )
    export_eagle3(folder, head, IDS, about, provenance(about, "eagle3", {}))
    target = HeadTarget(
        name="tiny",
        hidden_size=H,
        num_layers=num_layers,
        vocab_size=V,
        padded_vocab_size=V,
        embedding=lambda ids: F.embedding(ids, weights.embedding),
        lm_head=lambda hidden: hidden @ weights.head.T,
        fingerprint="def",
    )
    return head, target, weights


def test_it_guesses_what_training_says_it_guesses(tmp_path: Path) -> None:
    trained, target, _ = distilled(tmp_path)
    head = load_head(tmp_path, target)
    assert isinstance(head, EagleHead)
    assert (head.kind, head.layout, head.states, len(head.conventions)) == ("eagle3", "outrider", (1, 2, 4), 1)
    assert head.draft_ids is not None
    assert head.draft_ids.tolist() == IDS.tolist()
    length, num_steps = 12, 3
    ids = torch.randint(V, (1, length), generator=torch.Generator().manual_seed(4))
    states = random(1, length, 4, H, seed=5, scale=1.0)
    batch = SimpleNamespace(token_ids=ids, states=states)
    with torch.no_grad():
        hidden = trained.hidden(batch, num_steps)  # type: ignore[arg-type]
        expected = [trained.lm_head(h)[0] for h in hidden]
    features = states[0, :, :3].flatten(1)
    for start in range(1, length - num_steps):
        # Row m of expected[j] guesses token m + 1 after j own states: the last true pair is (m - j - 1, m - j).
        context = head.new_context()
        got = [context.extend(features[:start], ids[0, 1 : start + 1])]
        got += [context.step(int(ids[0, start + j])) for j in range(1, num_steps)]
        for j, logits in enumerate(got):
            torch.testing.assert_close(logits, expected[j][start + j], rtol=1e-3, atol=1e-3)


def test_batch_is_what_training_reads() -> None:
    """The stand-in above has the fields that `Eagle3Head.hidden` uses."""
    assert {"token_ids", "states"} <= set(Batch.__dataclass_fields__)


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    _, target, _ = distilled(tmp_path)
    with pytest.raises(InvalidArgument, match=r"trained for 'tiny', whose weights are not those of other"):
        load_head(tmp_path, replace(target, name="other", fingerprint="zzz"))
    load_head(tmp_path, replace(target, fingerprint=""))  # a target that has no name for its weights


def test_another_kind_of_draft_is_refused(tmp_path: Path) -> None:
    _, target, _ = distilled(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["outrider"]["kind"] = "model"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match="'model'"):
        load_head(tmp_path, target)
