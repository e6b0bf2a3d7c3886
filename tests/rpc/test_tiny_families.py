"""Tiny random models of several families: greedy text with any γ equals plain text, and equals transformers' own."""

import asyncio
import dataclasses

import pytest
from conftest import scaled
from stack import in_process_stack

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import outrider  # noqa: E402
from outrider.lm.loading import load_model  # noqa: E402
from outrider.settings import TargetWorkerSettings  # noqa: E402

VOCAB = 96
GREEDY = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}
FAMILIES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 16}),
}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
FURTHER_FAMILIES = {
    "qwen2_sliding": (
        transformers.Qwen2Config,
        transformers.Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3_sliding": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "mistral_sliding": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 8}),
    "gemma": (transformers.GemmaConfig, transformers.GemmaForCausalLM, {"head_dim": 16}),
    "gemma2": (
        transformers.Gemma2Config,
        transformers.Gemma2ForCausalLM,
        {"head_dim": 16, "sliding_window": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 20.0}
        | {"layer_types": ALTERNATING},
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        transformers.Gemma3ForCausalLM,
        {"head_dim": 16, "sliding_window": 8, "layer_types": ALTERNATING},
    ),
    "phi": (transformers.PhiConfig, transformers.PhiForCausalLM, {}),
    "phi3_sliding": (transformers.Phi3Config, transformers.Phi3ForCausalLM, {"pad_token_id": 0, "sliding_window": 9}),
}
ALL_FAMILIES = FAMILIES | FURTHER_FAMILIES
GAMMAS = (0, 1, 2, 3, 5, 8, 16, None)
FEWER_GAMMAS = (0, 2, 8, None)
"""None: adaptive."""
OFFERS = {"drafters": ("model", "tree")}


def save_tiny(folder, family, seed, scale=0.25):
    """A random model whose logits are spread enough that greedy text is no constant."""
    config_class, model_class, extra = ALL_FAMILIES[family]
    torch.manual_seed(seed)
    config = config_class(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=scale, bos_token_id=0, eos_token_id=1,
        tie_word_embeddings=False, **extra,
    )  # fmt: skip
    model_class(config).eval().save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder)
    return model_class.from_pretrained(folder).eval()


def byte_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "</s>": 1, **{c: i + 2 for i, c in enumerate(alphabet[: VOCAB - 2])}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


@pytest.mark.slow
@pytest.mark.parametrize("family", ALL_FAMILIES)
async def test_greedy_equals_plain_and_transformers(family, tmp_path):
    target_folder, draft_folder = tmp_path / "target", tmp_path / "draft"
    stock = save_tiny(target_folder, family, seed=1)
    save_tiny(draft_folder, family, seed=1)
    perturb(draft_folder, ALL_FAMILIES[family][1])

    def load(folder):
        loaded = load_model(TargetWorkerSettings(model=str(folder), dtype="float32", num_threads=1))
        return dataclasses.replace(loaded)

    rng = torch.Generator().manual_seed(7)
    prompts = [torch.randint(2, VOCAB, (n,), generator=rng).tolist() for n in (3, 9, 20, 37)[: scaled(40, at_least=4)]]
    expected = []
    for prompt in prompts:
        out = stock.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None)
        expected.append(tuple(out[0, len(prompt) :].tolist()))
    worker = {"kv_cache_bytes": 1 << 24}
    stack = in_process_stack(load(target_folder), load(draft_folder), worker=worker, draft_worker=OFFERS)
    gammas = [*((gamma, "model") for gamma in (GAMMAS if family in FAMILIES else FEWER_GAMMAS)), (5, "tree")]
    async with stack as services, outrider.Client(services.address) as client:
        num_accepted = num_drafted = 0
        for gamma, drafter in gammas:
            extra = {} if gamma is None else {"num_speculative_tokens": gamma}
            answers = await asyncio.gather(
                *(
                    client.complete(p, temperature=0.0, max_tokens=30, ignore_eos=True, drafter=drafter, **extra)
                    for p in prompts
                )
            )
            assert [a.token_ids for a in answers] == expected, f"γ={gamma}, {drafter}"
            num_drafted += sum(a.speculation.num_draft_tokens for a in answers)
            num_accepted += sum(a.speculation.num_accepted_draft_tokens for a in answers)
    assert 0 < num_accepted < num_drafted, "INCONCLUSIVE: the draft agreed always or never"


def perturb(folder, model_class):
    """A draft that mostly agrees: the target's weights and a little noise."""
    model = model_class.from_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_sliding", "gemma2"])
async def test_a_cache_of_another_type_keeps_the_promise_and_is_told(family, tmp_path):
    target_folder, draft_folder = tmp_path / "target", tmp_path / "draft"
    save_tiny(target_folder, family, seed=1)
    save_tiny(draft_folder, family, seed=1)
    perturb(draft_folder, ALL_FAMILIES[family][1])
    worker = {"dtype": "bfloat16", "kv_cache_dtype": "float16", "max_context_length": 100, "kv_cache_bytes": 1 << 24}
    target = {"numerics": "exact", "num_threads": 1}
    prompts = [[(5 * i * i + n) % (VOCAB - 2) + 2 for i in range(n)] for n in (5, 20, 37)]
    stack = in_process_stack(
        str(target_folder), str(draft_folder), worker=worker, target_worker=target, draft_worker=OFFERS
    )
    async with stack as services, outrider.Client(services.address) as client:
        assert (await client.model_info()).context_length == 100
        workers = (await client.server_info()).workers
        assert {worker.role for worker in workers} == {"target", "draft"}
        assert all(worker.numerics.environment["cache"] == "float16" for worker in workers)
        with pytest.raises(outrider.errors.InvalidArgument, match="100"):
            await client.complete([2] * 80, max_tokens=30)
        plain = [await client.complete(p, **GREEDY, num_speculative_tokens=0) for p in prompts]
        num_drafted = 0
        for gamma, drafter in ((2, "model"), (8, "model"), (8, "tree")):
            options = {**GREEDY, "drafter": drafter, "num_speculative_tokens": gamma}
            answers = await asyncio.gather(*(client.complete(p, **options) for p in prompts))
            assert [a.token_ids for a in answers] == [a.token_ids for a in plain]
            num_drafted += sum(a.speculation.num_draft_tokens for a in answers)
        assert num_drafted > 0, "INCONCLUSIVE"
