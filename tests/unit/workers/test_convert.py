"""Wire and back without loss, malformed bytes as faults, and what a drafted token costs on the wire."""

import dataclasses

import numpy as np
import pytest

from outrider.drafting.proposal import Proposal, ProposalFault, SparseQ
from outrider.errors import InvalidArgument
from outrider.lm.interface import ModelDescription
from outrider.lm.timing import PassTiming
from outrider.sampling.noise import hash_ids
from outrider.sampling.params import AcceptanceRule, Finish, Origin, SamplingParams, StoppingParams
from outrider.server_info import CacheCounters, Numerics, TargetDrafter
from outrider.serving import convert, convert_worker
from outrider.serving.messages import DraftOpening, FeatureRows, Header, TargetOpening, Verdict
from outrider.serving.token_logprobs import TokenLogprobs
from outrider.v1 import common_pb2, draft_pb2, target_pb2

SAMPLING = SamplingParams(0.7, 5, 0.9, 0.1, 1.1, 0.5, -0.5, {3: 1.5, 9: -2.0}, 2**63 + 1, 2, AcceptanceRule.TOKEN,
                          (9, 1, 5), ((1,), (2, 3, 2)))  # fmt: skip
STOPPING = StoppingParams(20, 3, frozenset({7, 8}))


def through_wire(message):
    return type(message).FromString(message.SerializeToString())


def sampled_proposal(num_tokens, num_entries, vocab=151_936, seed=0):
    rng = np.random.default_rng(seed)
    q = []
    for _ in range(num_tokens):
        ids = rng.choice(vocab, num_entries, replace=False).astype(np.uint32)
        counts = np.ones(num_entries, np.int64)
        counts[0] += 65_536 - num_entries
        q.append(SparseQ(ids, counts))
    return Proposal(
        token_ids=tuple(int(x.ids[0]) for x in q), q=tuple(q), drafter="model", queue_us=3000, compute_us=90_000
    )


@pytest.mark.parametrize(
    ("value", "to_pb", "from_pb"),
    [
        (Header(2, 1000, hash_ids((1, 2))), convert.header_to_pb, convert.header_from_pb),
        (
            PassTiming(True, 3, 4, 0.5, 0.25, 0.001, 0.125, 1, 9, 77),
            convert_worker.timing_to_pb, convert_worker.timing_from_pb,
        ),
        (SAMPLING, convert.sampling_to_pb, convert.sampling_from_pb),
        (STOPPING, convert.stopping_to_pb, convert.stopping_from_pb),
        (
            DraftOpening(epoch=1, prompt_ids=[1, 2], committed_ids=[3], sampling=SAMPLING, stopping=STOPPING,
                         session_id=b"0123456789abcdef", tenant="t", max_q_entries=32, drafter="lookup",
                         features="2,5,-1", target_fingerprint="ab"),
            convert.draft_open_to_pb, convert.draft_open_from_pb,
        ),
        (
            TargetOpening(epoch=1, prompt_ids=[1, 2], committed_ids=[], sampling=SAMPLING, stopping=STOPPING,
                          session_id=b"0123456789abcdef", tenant="t", logprobs=True, top_logprobs=3,
                          max_draft_tokens=8, priority=-2, prompt_logprobs=0,
                          features="-1", features_start=4),
            convert.target_open_to_pb, convert.target_open_from_pb,
        ),
        (
            Verdict(header=Header(1, 5, 6), committed_ids=(7, 8), origins=(Origin.ACCEPTED, Origin.CORRECTION),
                    num_accepted=1, num_draft_tokens=3, soft_acceptances=b"\xff\x01\x80", finish=Finish.STOP,
                    matched_stop_token_id=0,
                    logprobs=TokenLogprobs.pack([-0.5, -1.5], 2, [1, 2, 3, 4], [-0.5, -1.0, -0.25, -2.0]),
                    queue_us=1, compute_us=2, sampling_us=3, num_batch_rows=4, decode_ended=True, num_cached_tokens=5,
                    drafted_ids=(7, 9, 8), drafted_parents=(-1, -1, 0), draft_us=6, features=FeatureRows(4, b"12")),
            convert.verdict_to_pb, convert.verdict_from_pb,
        ),
        (
            ModelDescription("m", "f", "t", 100, 64, b"{}", "{{ x }}", {"bos_token": "<s>"}, (1, 2), 0,
                             {"temperature": 0.5, "top_k": 20}, "bfloat16", 5, "n", {"torch": "1"}, True,
                             Numerics("exact", True, (1, 2, 32), 5, 640, 1.5, {"processor": "p"})),
            convert_worker.description_to_pb, convert_worker.description_from_pb,
        ),
        *(
            (TargetDrafter("fast", "eagle3", "heads/a", 7, 14, 3, agreement, 200, 1.5, 0.75, "weak",
                           True, (0.5, 0.25), (0.5, 0.375)),
             convert_worker.target_drafter_to_pb, convert_worker.target_drafter_from_pb)
            for agreement in (0.0, 0.5, None)
        ),
        (CacheCounters(1, 2, 3, 4), convert_worker.cache_counters_to_pb, convert_worker.cache_counters_from_pb),
    ],
    ids=lambda value: type(value).__name__ if not callable(value) else "",
)  # fmt: skip
def test_round_trip(value, to_pb, from_pb):
    assert from_pb(through_wire(to_pb(value))) == value


def test_proposal_round_trip_mixes_sampled_and_one_hot():
    sampled = sampled_proposal(3, 5)
    proposal = Proposal((*sampled.token_ids, 7), (*sampled.q[:2], None, None), (1.0, 0.0, 1.0, 0.2), "x", 1, 2, 3)
    back = convert.proposal_from_pb(through_wire(convert.proposal_to_pb(proposal)))
    assert back.token_ids == proposal.token_ids
    assert back.confidences == proposal.confidences
    assert (back.drafter, back.queue_us, back.compute_us, back.num_ingested_tokens) == ("x", 1, 2, 3)
    for mine, theirs in zip(proposal.q, back.q, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert mine.ids.tolist() == theirs.ids.tolist()
            assert mine.counts.tolist() == theirs.counts.tolist()


def test_a_tree_keeps_its_shape_and_a_chain_sends_none():
    drafts = sampled_proposal(4, 5)
    tree = dataclasses.replace(drafts, parents=(-1, 0, -1, 2))
    message = through_wire(convert.proposal_to_pb(tree))
    assert convert.proposal_from_pb(message).parents == tree.parents
    message.ClearField("parents")
    assert message.SerializeToString() == convert.proposal_to_pb(drafts).SerializeToString()
    assert convert.proposal_from_pb(message).parents == ()


def test_one_id_with_all_of_the_mass_fits():
    proposal = Proposal((3,), (SparseQ(np.array([3], np.uint32), np.array([65_536])),))
    assert convert.proposal_from_pb(convert.proposal_to_pb(proposal)).q[0].counts.tolist() == [65_536]


@pytest.mark.parametrize(
    "message",
    [
        common_pb2.Proposal(token_ids=[1, 2], q_sizes=[1]),
        common_pb2.Proposal(token_ids=[1], q_sizes=[1], q_ids=b"1234", q_counts=b"1"),
        common_pb2.Proposal(token_ids=[1], q_sizes=[1], q_ids=b"123", q_counts=b"12"),
        common_pb2.Proposal(token_ids=[1], q_sizes=[2**32 - 1], q_ids=b"1234", q_counts=b"12"),
        common_pb2.Proposal(token_ids=[1], q_ids=b"1234", q_counts=b"12"),
        common_pb2.Proposal(token_ids=[1], confidences=b"12"),
        common_pb2.Proposal(token_ids=[1], parents=[0, 0]),
    ],
)
def test_bytes_that_do_not_add_up_are_faults(message):
    with pytest.raises(ProposalFault):
        convert.proposal_from_pb(message)


@pytest.mark.parametrize("parents", [(0,), (0, 2), (0, 9), (0, 1, 1)], ids=str)
def test_a_verdict_whose_own_drafts_are_no_tree_cannot_be_read(parents):
    message = convert.verdict_to_pb(Verdict(header=Header(1, 5, 6), committed_ids=(7,), origins=(Origin.PLAIN,)))
    message.drafted_ids.extend((7, 8))
    assert convert.verdict_from_pb(message).drafted_parents == ()
    message.drafted_parents.extend(parents)
    with pytest.raises(ValueError, match="no tree of 2 drafts"):
        convert.verdict_from_pb(message)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (common_pb2.ResolvedSampling(logit_bias_ids=[1]), "open.sampling.logit_bias_values"),
        (common_pb2.ResolvedSampling(logit_bias_ids=[1, 1], logit_bias_values=[1, 2]), "open.sampling.logit_bias_ids"),
        (common_pb2.ResolvedSampling(), "open.sampling.acceptance"),
        (
            common_pb2.ResolvedSampling(acceptance=1, bad_word_sizes=[1, 2], bad_word_ids=[4, 5]),
            "open.sampling.bad_word_sizes",
        ),
        (
            common_pb2.ResolvedSampling(acceptance=1, bad_word_sizes=[0, 2], bad_word_ids=[4, 5]),
            "open.sampling.bad_word_sizes",
        ),
    ],
)
def test_sampling_that_no_dataclass_holds(message, field):
    with pytest.raises(InvalidArgument) as error:
        convert.sampling_from_pb(message)
    assert error.value.field == field


MAX_HEADER_BYTES = 64


@pytest.mark.parametrize("num_tokens", [1, 4, 8])
@pytest.mark.parametrize(("num_entries", "max_bytes"), [(64, 400), (0, 8)])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_bytes_per_drafted_token(num_tokens, num_entries, max_bytes, shape):
    """Both legs: the draft worker's answer and the target's `verify`, each beside one header of at most 64 bytes."""
    proposal = sampled_proposal(num_tokens, max(1, num_entries))
    if not num_entries:
        proposal = Proposal(tuple([151_935] * num_tokens), (), (), "model", 3000, 90_000, 1)
    if shape == "tree":
        proposal = dataclasses.replace(proposal, parents=tuple(range(num_tokens))[::-1])
    header = convert.header_to_pb(Header(3, 131_072, hash_ids((1,))))
    message = convert.proposal_to_pb(proposal)
    for envelope in (
        draft_pb2.DraftServiceSessionResponse(proposal=draft_pb2.DraftProposal(header=header, proposal=message)),
        target_pb2.TargetServiceSessionRequest(verify=target_pb2.TargetVerify(header=header, proposal=message)),
    ):
        assert len(envelope.SerializeToString()) <= MAX_HEADER_BYTES + num_tokens * max_bytes
