"""Generation: sequences leave the batch when they end, beams take their states along, no attention layer is needed."""

from functools import cache

import pytest
import torch
from replayssm_emulation import parse_scheme
from replayssm_kernels import BatchRow, replay_scan
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
)

from replayssm_eval import attach
from replayssm_eval.inference import decoding
from replayssm_eval.inference.decoding import decode
from replayssm_eval.inference.step_graphs import StepGraphs
from tests.helpers.models import VOCAB, nemotron_h, strong_states, tiny_nemotron_h, token_ids

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where Triton kernels run, or are interpreted
PROMPT, ENDS = 9, (3, 14, 1, 8)
SCHEME = parse_scheme("nvfp4@2")


class EndsAt(StoppingCriteria):
    """Ends row i at its own length, and notices when it is not shown all rows."""

    def __init__(self, ends):
        self.ends = torch.tensor(ends)

    def __call__(self, input_ids, scores, **kwargs):
        assert len(input_ids) == len(self.ends)
        return (input_ids.shape[1] - PROMPT >= self.ends).to(input_ids.device)


def generate(session, model, ids, documents, ends, **kwargs) -> list[list[int]]:
    session.start([BatchRow(SCHEME, seed=3, document=d, prompt=PROMPT) for d in documents])
    out = model.generate(
        ids, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None,
        stopping_criteria=StoppingCriteriaList([EndsAt(ends)]), **kwargs
    )  # fmt: skip
    return [row[PROMPT : PROMPT + n].tolist() for row, n in zip(out, ends, strict=True)]


@pytest.mark.parametrize("pattern", ["M-M*", "MM-"], ids=["hybrid", "no-attention"])
def test_sequences_leave_the_batch(pattern) -> None:
    """The same answers as transformers' own loop and as every sequence alone, from fewer rows."""
    model = nemotron_h(pattern)
    ids = torch.cat([token_ids(PROMPT, seed=n) for n in range(len(ENDS))])
    with torch.inference_mode(), attach(model, [SCHEME]) as session:
        whole = generate(session, model, ids, range(4), ENDS)
        sizes: list[int] = []
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        assert generate(session, model, ids, range(4), ENDS, custom_generate=decode) == whole
        hook.remove()
        alone = [
            generate(session, model, ids[n : n + 1], [n], ENDS[n : n + 1], custom_generate=decode)[0] for n in range(4)
        ]
    assert alone == whole
    assert sizes == [4, 3, 3, *[2] * 5, *[1] * 6]


def test_copies_and_noise_follow_the_sequence() -> None:
    """The longest row, its neighbours gone, has the copy of that row alone, and not of another document's noise.

    Answers would not show it: these models hardly listen to their states. A product of another shape may round
    differently, move a scale by an ulp, and tip an element here and there over a rounding boundary.
    """
    model = nemotron_h("MM-")
    ids = torch.cat([token_ids(PROMPT, seed=n) for n in range(4)])
    longest = ENDS.index(max(ENDS))
    with torch.inference_mode(), attach(model, [SCHEME], probe=False) as session:

        def copy(rows, documents):
            generate(session, model, ids[rows], documents, [ENDS[r] for r in rows], custom_generate=decode)
            return session.export()[0]["state.1.0.recurrence"]

        batch = copy([0, 1, 2, 3], range(4))
        same, other = (torch.isclose(batch, copy([longest], [n]), rtol=1e-4).float().mean() for n in (longest, 0))
    assert same > 0.98
    assert other < 0.9


def test_beams_take_their_states_along() -> None:
    model, ids = nemotron_h("M-M*"), token_ids(PROMPT)
    options = {"num_beams": 3, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **options)
    moves = []
    with torch.inference_mode(), attach(model, ["fp32"] * 3, follow_hf_clamp=True, probe=False) as session:
        reorder = session.reorder
        session.reorder = lambda rows: (moves.append(rows), reorder(rows))
        assert torch.equal(model.generate(ids, **options), expected)
    assert any(rows != [0, 1, 2] for rows in moves), "no beam moved: the test shows nothing"


class Scores(LogitsProcessor):
    """Keeps the scores of every step by prompt and length."""

    def __init__(self):
        self.seen = {}

    def __call__(self, input_ids, scores):
        for row, values in zip(input_ids.tolist(), scores.clone().cpu(), strict=True):
            self.seen[tuple(row[:PROMPT]), len(row)] = values
        return scores


@cache
def tiny_bamba() -> BambaForCausalLM:
    """Rotary positions, which padding on the left shifts; heads of 10 x 12."""
    torch.manual_seed(0)
    config = BambaConfig(
        vocab_size=VOCAB, hidden_size=20, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1,
        attn_layer_indices=[1], mamba_n_heads=2, mamba_d_head=10, mamba_d_state=12, mamba_n_groups=1,
        mamba_expand=1, mamba_chunk_size=32,
    )  # fmt: skip
    return strong_states(BambaForCausalLM(config).eval())


@pytest.mark.parametrize(
    ("build", "scheme", "ends"),
    [
        (tiny_bamba, "nvfp4@4", (6, 2, 18, 1)),
        (tiny_nemotron_h, "nvfp4/fp16@4", (9,) * 2),
        (tiny_nemotron_h, "fp8@1", (5,) * 2),
    ],
    ids=["leaving", "together", "single-tokens"],
)
@pytest.mark.interpreter
def test_replayed_steps_are_the_steps(build, scheme, ends) -> None:
    """Left-padded rows get the scores of steps one by one, also when rows have left the batch and caches have grown.

    If the batches are the same, their copies are equal bit for bit. Steps are CUDA graphs on a GPU; elsewhere they run
    one by one.
    """
    model, parsed = build().to(DEVICE), parse_scheme(scheme)
    ids = torch.cat([token_ids(PROMPT, seed=n) for n in range(len(ends))]).to(DEVICE)
    padding = (2, 0, 5, 0)[: len(ends)]
    mask = torch.tensor([[0] * n + [1] * (PROMPT - n) for n in padding], device=DEVICE)
    replayed = []
    call = StepGraphs.__call__

    def counted(self, tokens):
        replayed.append(len(tokens))
        return call(self, tokens)

    def made(**options):
        scores = Scores()
        session.start([BatchRow(parsed, seed=3, document=d, prompt=PROMPT, padding=n) for d, n in enumerate(padding)])
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None,
            logits_processor=LogitsProcessorList([scores]),
            stopping_criteria=StoppingCriteriaList([EndsAt(ends)]), custom_generate=decode, **options,
        )  # fmt: skip
        return out, scores.seen, *session.export()

    with (
        torch.inference_mode(),
        attach(model, [parsed], backend="triton", probe=False) as session,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(StepGraphs, "__call__", counted)
        patch.setattr(decoding, "_LOOK_EVERY", 4)
        patch.setattr(decoding, "_ROOM", 8)
        expected, scores, tensors, facts = made()
        assert not replayed
        answers, replayed_scores, replayed_tensors, replayed_facts = made(session=session)
        if len(set(ends)) > 1:
            by_length = made(
                session=session,
                ended=lambda generated, rows: generated.shape[1] >= torch.tensor(ends, device=DEVICE)[rows],
            )
            assert torch.equal(by_length[0], expected)
    model.to("cpu")
    assert torch.equal(answers, expected)
    for key, values in scores.items():
        assert torch.allclose(replayed_scores[key], values, rtol=0, atol=1e-4 * values.abs().max()), key
    if len(set(ends)) > 1:
        assert set(replayed) == {4, 2, 1}
        assert replayed.count(1) > 2 * 8, "no cache has grown"
    else:
        assert set(replayed) == {len(ends)}
        assert replayed_tensors.keys() == tensors.keys()
        assert [name for name, x in tensors.items() if not torch.equal(x, replayed_tensors[name])] == []
        for layer, found in facts["layers"].items():
            assert {**found, "serial": 0} == {**replayed_facts["layers"][layer], "serial": 0}


@pytest.mark.interpreter
def test_steps_inside_a_prompt_are_not_replayed() -> None:
    """The prompt is longer than the first pass. Steps must know positions, or the state would never be rounded."""
    model, scheme = tiny_nemotron_h().to(DEVICE), parse_scheme("nvfp4@4")
    options = {
        "max_new_tokens": 8,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
        "custom_generate": decode,
    }
    with torch.inference_mode(), attach(model, [scheme], backend="triton", probe=False) as session:
        flushes = []
        for more in ({}, {"session": session}):
            session.start([BatchRow(scheme, prompt=20)])
            model.generate(token_ids(16).to(DEVICE), **options, **more)
            flushes.append(session.flushes)
    model.to("cpu")
    assert flushes[0] == flushes[1]
    assert flushes[0][0] == [1]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.interpreter
def test_rows_go_on_where_they_are_moved(backend) -> None:
    """Rows of two schedules and three casts, left out and repeated: bit for bit the rows that never moved."""
    schemes = ["nvfp4@4", "fp16/fp16@4", "fp32@16", "nvfp4@4"]
    rows = [BatchRow(parse_scheme(s), seed=1, document=d) for d, s in enumerate(schemes)]
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 21, 1, 12, generator=g)
    v = torch.randn(1, 21, 2, 10, generator=g)
    beta, log_decay = torch.rand(2, 1, 21, 2, generator=g)
    inputs = [x.to(DEVICE if backend == "triton" else "cpu") for x in (q, k, v, beta, -log_decay)]

    def scan(rows, carry, a, b):
        return replay_scan(
            *(x[:, a:b].expand(len(rows), *x[:, a:b].shape[1:]) for x in inputs), rows, carry, layer=0, backend=backend
        )

    _, carry = scan(rows, None, 0, 10)
    expected, _ = scan(rows, carry, 10, 21)
    order = [3, 0, 3, 1]
    _, carry = scan(rows, None, 0, 10)
    carry.reorder(order)
    got, carry = scan([rows[i] for i in order], carry, 10, 21)
    assert torch.equal(got, expected[order])
    assert sorted(r for group in carry.groups for r in group.rows) == [0, 1, 2, 3]


def test_a_new_cache_is_empty_whatever_went_before() -> None:
    """Without attention layers a cache cannot tell its length; asked of the session it would be the last sequence's."""
    model = nemotron_h("MM-")
    short, long = token_ids(5), token_ids(13, seed=1)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.inference_mode(), attach(model, ["fp32"], probe=False) as session:
        expected = model.generate(long, **options)
        session.start(session.rows)
        model.generate(short, **options)
        seen = []
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        assert torch.equal(model.generate(long, **options), expected)
        hook.remove()
    assert seen == [13, 1, 1, 1]
