"""Tiny checkpoints on disk: a random model, a byte-level tokenizer of its ids, and what tests change of them."""

import json

import tokenizers
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import tiny

NUM_LETTERS = 88


def save_tokenizer(folder):
    """90 ids: 88 letters, a beginning and an end."""
    letters = {chr(33 + i): i for i in range(NUM_LETTERS)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )


def save_tiny(folder, kind="Llama", **extra):
    """The model that was saved, float32."""
    model = tiny(kind, **extra)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def change_config(folder, **values):
    """Sets fields of config.json; None removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def read_tensors(folder):
    return load_file(folder / "model.safetensors")


def write_tensors(folder, tensors):
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
