"""A worker holds one copy of its weights: packed ones replace the originals, the input embedding stays in a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import tokenizers  # noqa: E402
import transformers  # noqa: E402
from tiny_models import tiny  # noqa: E402

from outrider.lm.cpu_linear import packs  # noqa: E402

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")

ALLOWANCE = 16 << 20
MEASURE = """
import sys
import outrider.lm
from outrider.lm.interface import PackedBatch, Segment
from outrider.lm.loading import load_model
from outrider.lm.memory import anonymous_bytes, give_back_freed
from outrider.settings import WorkerSettings

def load(path, dtype):
    loaded = load_model(WorkerSettings(model=path, num_threads=1, dtype=dtype))
    loaded.model.allocate_cache(4, 16)
    loaded.model.forward(PackedBatch((Segment(0, list(range(5)), [0, 1], 1),)))
    return loaded

small = load(sys.argv[1], sys.argv[3])  # what any model loads and allocates once
give_back_freed()
before = anonymous_bytes()
large = load(sys.argv[2], sys.argv[3])
print(anonymous_bytes() - before)
"""


def saved(path, **sizes):
    torch.manual_seed(0)
    model = tiny("Llama", **sizes).to(torch.bfloat16)
    model.save_pretrained(path)
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(90)}, "w0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(path)
    return model


@pytest.mark.parametrize(("tied", "dtype"), [(True, "bfloat16"), (True, "float32"), (False, "bfloat16")])
def test_weights_are_held_once(tmp_path: Path, tied: bool, dtype: str) -> None:
    """The embedding is 33 MB of bfloat16 here, and twice that in float32, which no file holds."""
    saved(tmp_path / "small")
    sizes = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1024, "tie_word_embeddings": tied}
    model = saved(tmp_path / "large", **sizes)
    size = getattr(torch, dtype).itemsize
    read = sum(p.numel() for name, p in model.named_parameters() if tied or "embed_tokens" not in name) * size
    embedding = model.get_input_embeddings().weight.numel() * size
    assert embedding > 0.05 * read + ALLOWANCE  # a second copy of it would show
    arguments = [str(tmp_path / "small"), str(tmp_path / "large"), dtype]
    done = subprocess.run([sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    held = int(done.stdout.splitlines()[-1])
    # what is not packed may stay in the file, mapped
    least = 0.5 * read if packs(getattr(torch, dtype)) else 0
    assert least < held <= 1.05 * read + ALLOWANCE, (held, read)
