"""A tiny target whose next token follows mostly from its last one, with letters as vocabulary, and its prompts."""

import json
import random

import tokenizers
import torch
import transformers

NUM_LETTERS, VOCAB_SIZE, EOS = 62, 64, 63
LETTERS = [chr(33 + i) for i in range(NUM_LETTERS) if chr(33 + i) not in '"\\']
NUM_LAYERS = 7


def target_model(**extra):
    """Seeded, float32. Layers change the residual stream little, and the head is peaked: so a draft can learn it."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.3,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": EOS,
        }
        | extra
    )
    model = transformers.LlamaForCausalLM(config).eval().float()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(3.0)
        model.lm_head.weight.mul_(2.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.15)
            layer.mlp.down_proj.weight.mul_(0.15)
    model.generation_config.eos_token_id = EOS
    return model


def write_target(path, **extra):
    """A folder that `model` may name."""
    target_model(**extra).save_pretrained(path)
    letters = {letter: i for i, letter in enumerate(LETTERS)}
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(letters | {chr(200 + i): len(letters) + i for i in range(2)}, [])
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens(["<s>", "</s>"])
    assert inner.token_to_id("</s>") == EOS
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(path)
    return path


def write_prompts(path, count=120):
    """A JSONL file of different prompts."""
    chance = random.Random(0)
    texts = {"".join(chance.choices(LETTERS, k=chance.randint(3, 9))) for _ in range(count)}
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in sorted(texts)))
    return path


def toy_settings(**extra):
    """Of a run that takes seconds."""
    from outrider.settings import DistillSettings

    values = {
        "dtype": "float32",
        "num_threads": 1,
        "batch_size": 32,
        "max_new_tokens": 20,
        "draft_vocab_size": 48,
        "num_steps": 100,
        "learning_rate": 0.04,
        "train_batch_tokens": 256,
        "held_out_prompts": 16,
        "num_unrolled_steps": 3,
        "minutes": 60.0,
    }
    return DistillSettings(**values | extra)


def quiet(text, fraction):
    """Progress that nobody watches."""
