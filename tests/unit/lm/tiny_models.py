"""Tiny random transformers models of several families, with weights large enough that an error shows in the logits."""

import copy

import torch
import transformers

VOCAB_SIZE = 97
CONTEXT_LENGTH = 256

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "initializer_range": 0.3,
}
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen2_sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "mistral_sliding": ("Mistral", {"sliding_window": 6}),
    "gemma2": ("Gemma2", {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", {"head_dim": 8, "sliding_window": 7, "sliding_window_pattern": 2}),
    "phi": ("Phi", {}),
}


def tiny(kind, **extra):
    """A model named by transformers' prefix (`Llama`), float32, seeded."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # nothing here is worth a second thread, and on a busy machine two spin against others
    config = getattr(transformers, f"{kind}Config")(**_COMMON | extra)
    return getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval().float()


def tiny_pair(family):
    """The same model twice: one for ours, one that stays stock."""
    kind, extra = FAMILIES[family]
    model = tiny(kind, **extra)
    return model, copy.deepcopy(model)


@torch.inference_mode()
def stock_logits(stock, token_ids):
    """float32[len, vocab] of a fresh full forward, without cache."""
    return stock(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].numpy()


@torch.inference_mode()
def stock_states(stock, token_ids, states):
    """float32[len, len(states) * H] of transformers' `hidden_states`, -1 being the last of them."""
    out = stock(input_ids=torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)
    return torch.cat([out.hidden_states[state][0] for state in states], 1).numpy()
