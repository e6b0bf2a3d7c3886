"""What generation captures, against the stock model; the head's unroll, against a chain drafted pair by pair."""

import pytest

import outrider.lm  # noqa: F401  # before torch: it says how torch's threads wait

torch = pytest.importorskip("torch")

import transformers  # noqa: E402
from distill_toys import EOS, NUM_LAYERS, VOCAB_SIZE, quiet, toy_settings, write_target  # noqa: E402

from outrider.distill.batches import Corpus  # noqa: E402
from outrider.distill.eagle3 import Eagle3Head  # noqa: E402
from outrider.distill.generation import Job, generate  # noqa: E402
from outrider.distill.shards import Shard, read_shard, write_shard  # noqa: E402
from outrider.distill.target import LAST, Target, state_layers  # noqa: E402
from outrider.errors import InvalidArgument  # noqa: E402

PROMPTS = [[5, 9, 1], [7], [3, 3, 3, 40, 2, 8], [11, 12], [60, 1, 2, 3]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture(scope="module")
def target(folder):
    return Target(toy_settings(model=str(folder), out="unused"), quiet)


@pytest.fixture(scope="module")
def stock(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def stock_states(stock, ids):
    """[n, 4, H] and the logits [n, V]: a plain pass with transformers' own hidden states."""
    result = stock(input_ids=torch.tensor([ids]), use_cache=False, output_hidden_states=True)
    wanted = [2, NUM_LAYERS // 2, NUM_LAYERS - 3, NUM_LAYERS]  # the last one is after the norm
    return torch.stack([result.hidden_states[i][0] for i in wanted], 1), result.logits[0]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_states_and_greedy_text_are_the_stock_model_s(target, stock, temperature):
    jobs = [Job(i, prompt, temperature) for i, prompt in enumerate(PROMPTS)]
    sequences, states = generate(target, jobs, max_new_tokens=15, seed=1)
    assert {s.num_generated for s in sequences} & set(range(2, 16))
    for job, sequence, own in zip(jobs, sequences, states, strict=True):
        expected, logits = stock_states(stock, sequence.token_ids)
        torch.testing.assert_close(own, expected, atol=2e-4, rtol=1e-3)
        said = [*sequence.token_ids[len(job.prompt_ids) :], sequence.next_token]
        assert sequence.token_ids[: len(job.prompt_ids)] == job.prompt_ids
        assert EOS not in said[:-1]
        assert len(said) == 15 or said[-1] == EOS
        if temperature == 0:
            assert said == logits[len(job.prompt_ids) - 1 :].argmax(-1).tolist()


def test_texts_do_not_depend_on_the_batch(target):
    jobs = [Job(i, prompt, 1.0) for i, prompt in enumerate(PROMPTS)]
    together, _ = generate(target, jobs, max_new_tokens=12, seed=1)
    alone = [generate(target, [job], max_new_tokens=12, seed=1)[0][0] for job in jobs]
    assert together == alone
    assert generate(target, jobs, max_new_tokens=12, seed=2)[0] != together


def test_drawn_tokens_follow_the_target_s_distribution(target, stock):
    jobs = [Job(i, [5, 9, 1], 0.7) for i in range(600)]
    said, _ = generate(target, jobs, max_new_tokens=1, seed=3)
    counts = torch.bincount(torch.tensor([s.next_token for s in said]), minlength=VOCAB_SIZE)
    p = torch.softmax(stock_states(stock, [5, 9, 1])[1][-1] / 0.7, -1)
    assert float((counts / 600 - p).abs().sum()) < 0.25
    assert float((counts / 600 - torch.softmax(p.log() * 0.7, -1)).abs().sum()) > 0.3  # as at temperature 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_come_back_as_they_were_written(target, tmp_path, dtype):
    sequences, states = generate(target, [Job(i, p, 0.0) for i, p in enumerate(PROMPTS)], max_new_tokens=5, seed=0)
    states = [s.to(dtype) for s in states]
    write_shard(tmp_path, "one", sequences, states, 1.5, {"position": 5})
    shard = read_shard(tmp_path, "one")
    assert (shard.sequences, shard.seconds, shard.about) == (sequences, 1.5, {"position": 5})
    for index, expected in enumerate(states):
        assert torch.equal(shard.states_of(index), expected)


def test_layers_whose_inputs_are_taken():
    assert state_layers(30) == (2, 15, 27)
    assert state_layers(32) == (2, 16, 29)
    assert all(0 <= min(state_layers(n)) <= max(state_layers(n)) < n for n in range(1, 9))


@pytest.mark.parametrize(
    ("extra", "field"),
    [({"model": "toy:vocab=8"}, "model"), ({"kind": "model", "draft_layers": "3,99"}, "draft_layers")],
)
def test_targets_and_layers_that_do_not_serve(folder, extra, field):
    with pytest.raises(InvalidArgument, match=field):
        Target(toy_settings(**{"model": str(folder), "out": "unused"} | extra), quiet)


@torch.inference_mode()
def chain(head, states, token_ids, start, num_steps):
    """States that guess after `start`, one pair at a time with explicit keys: the slow twin of `Eagle3Head.hidden`.

    states [n, 4, H] of the true tokens; true pairs are read up to `start`, then own outputs take the states' place.
    """
    layer, attention = head.midlayer, head.midlayer.self_attn
    keys, values, results = [], [], []
    feature = None
    for position in range(start + num_steps):
        feature = head.fuse(states[None, position : position + 1]) if position <= start else feature
        embedded = head._embedding[0][token_ids[position + 1]][None, None]
        x = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(feature)], -1)
        q, k, v = attention.project(x, position)
        keys.append(k)
        values.append(v)
        scores = (q @ torch.cat(keys, 2).transpose(-1, -2)) / q.shape[-1] ** 0.5
        attended = scores.softmax(-1) @ torch.cat(values, 2)
        a = feature + attention.o_proj(attended.transpose(1, 2).flatten(2))
        feature = a + layer.mlp(layer.post_attention_layernorm(a))
        if position >= start:
            results.append(head.norm(feature)[0, 0])
    return results


def test_the_unroll_is_a_chain_from_every_start(target):
    torch.manual_seed(0)
    head = Eagle3Head(target.weights, torch.arange(0, VOCAB_SIZE, 2))
    sequences, states = generate(target, [Job(i, p, 1.0) for i, p in enumerate(PROMPTS)], max_new_tokens=8, seed=0)
    corpus = Corpus([Shard(sequences, torch.cat(states), 0.0, {})])
    order = list(range(len(PROMPTS)))
    batch = corpus.batch(order)
    num_compared = 0
    with torch.inference_mode():
        hidden = head.hidden(batch, 4)
    for row, (sequence, own) in enumerate(zip(sequences, states, strict=True)):
        ids = [*sequence.token_ids, sequence.next_token]
        for start in range(len(sequence.token_ids) - 4):
            for step, expected in enumerate(chain(head, own, ids, start, 4)):
                torch.testing.assert_close(hidden[step][row, start + 1 + step], expected, atol=2e-4, rtol=1e-3)
                num_compared += 1
    assert num_compared > 40


def test_rotary_angles_are_transformers_own(target):
    attention = Eagle3Head(target.weights, torch.arange(4)).midlayer.self_attn
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(target.weights.config)
    cos, sin = rotary(torch.zeros(1), torch.arange(3, 9)[None])
    own_cos, own_sin = attention._angles(3, 6)
    torch.testing.assert_close((own_cos, own_sin), (cos[0], sin[0]))
    assert LAST == 3
