"""Schemes inside Hugging Face models: equal to the unpatched model in fp32, loud about a bypass, gone on exit."""

import importlib
from copy import deepcopy

import pytest
import torch
from replayssm_emulation import RunError, UsageError, parse_scheme
from replayssm_kernels import BatchRow
from transformers import DynamicCache

from replayssm_eval import attach
from replayssm_eval.inference.forward import hidden_states
from replayssm_eval.models.families import FAMILIES, state_layers
from tests.helpers.models import mamba1, mamba2, nemotron_h, tiny_nemotron_h, token_ids

MODELS = {
    "NemotronH-M-M*": lambda: nemotron_h("M-M*"),
    "NemotronH-MEM*": lambda: nemotron_h("MEM*"),
    "NemotronH-MM": lambda: nemotron_h("MM"),
    "Mamba2": mamba2,
}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where Triton kernels run, or are interpreted
pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(params=MODELS, ids=str)
def model(request):
    return MODELS[request.param]()


def logits(model, ids, pieces=None, cache=None):
    """Logits of `ids` `[R, T]` read in pieces (one, if not given), with a cache."""
    cache = cache or DynamicCache(config=model.config)
    position, parts = 0, []
    for length in pieces or [ids.shape[1]]:
        parts.append(
            model.get_output_embeddings()(hidden_states(model, ids[:, position : position + length], cache, position))
        )
        position += length
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("tokens", [1, 32, 77])
def test_one_fp32_row_equals_the_unpatched_model(model, tokens) -> None:
    ids = token_ids(tokens)
    expected = model(input_ids=ids, use_cache=False).logits
    with attach(model, ["fp32"], follow_hf_clamp=True):
        got = model(input_ids=ids, use_cache=False).logits
    assert (got - expected).abs().max() <= 1e-4
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("pieces", [(17, 23), (17, 1, 22), (1,) * 40], ids=lambda p: f"{len(p)}-pieces")
def test_pieces_equal_one_pass(model, pieces) -> None:
    """P1: every way of reading 40 tokens gives the same logits, in fp32 and with rounded states."""
    ids = token_ids(40, rows=3)
    with attach(model, ["fp32", "nvfp4@16", "nvfp4/fp16@16"]):
        whole = logits(model, ids)
        assert_same_rounding(whole, logits(model, ids, pieces))


def assert_same_rounding(whole, cut):
    """fp32 rows (row 0) agree to 1e-4. In the others the roundoff of the matrix products, 1e-7, tips one element in
    thousands over a rounding boundary: that is far below the drift that the rounding itself causes."""
    assert (whole[0] - cut[0]).abs().max() <= 1e-4
    for row in range(1, len(whole)):
        assert (whole[row] - cut[row]).norm() <= 0.02 * (whole[row] - whole[0]).norm()


@pytest.mark.parametrize("size", [1, 63, 64, 65, 100, 256])
def test_rounding_points_do_not_follow_the_piece_size(size) -> None:
    """P4: 640 tokens in pieces of any size are rounded at the same 40 flushes."""
    model, tokens = nemotron_h("M-M*"), 640
    ids = token_ids(tokens, rows=2)
    pieces = [size] * (tokens // size) + ([tokens % size] if tokens % size else [])
    with attach(model, ["fp32", "nvfp4@16"], probe=False) as session:
        whole = logits(model, ids)
        cut = logits(model, ids, pieces)
        assert session.flushes == {0: [tokens // 16] * 2, 2: [tokens // 16] * 2}
    assert_same_rounding(whole, cut)


def test_rows_drift_by_their_scheme_and_fp32_rows_do_not(model) -> None:
    with attach(model, ["fp32", "fp32", "nvfp4@16", "fp8@16"]) as session:
        out = logits(model, token_ids(77, rows=4))
        assert set(map(tuple, session.flushes.values())) == {(4,) * 4}
        session.check_rounding([4] * 4)
        assert session.tokens == 77
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0, :16], out[2, :16])
    assert 0 < (out[3] - out[0]).norm() < (out[2] - out[0]).norm()


def test_a_row_is_the_same_alone_and_in_company(model) -> None:
    ids = token_ids(50, rows=3)
    with attach(model, ["fp32", "fp8@1", "nvfp4@16"]):
        together = logits(model, ids)
    for row, scheme in ((1, "fp8@1"), (2, "nvfp4@16")):
        with attach(model, [scheme]):
            alone = torch.cat([together[:1], logits(model, ids[:1])])
        assert_same_rounding(alone, together[[0, row]])


def test_document_b_after_a_poisoned_document_a_equals_b_alone(model) -> None:
    """A new cache is a new sequence: nothing of the old states is left."""
    ids = token_ids(50, rows=2)
    with attach(model, ["fp32", "nvfp4@16"]) as session:
        alone = logits(model, ids)
        logits(model, token_ids(37, rows=2, seed=1))
        for layer in session.layers:
            for group in session.states.groups(layer):
                group.recurrence.fill_(torch.nan)
        assert torch.equal(logits(model, ids), alone)


def test_a_cache_of_another_sequence_is_refused(model) -> None:
    with attach(model, ["fp32"]):
        cache = DynamicCache(config=model.config)
        logits(model, token_ids(20), cache=cache)
        logits(model, token_ids(20))
        with pytest.raises(RunError, match="another sequence"):
            hidden_states(model, token_ids(5), cache, 20)


def test_a_prompt_runs_in_full_precision() -> None:
    model = nemotron_h("M-M*")
    rows = [
        BatchRow(parse_scheme("nvfp4@16"), prompt=30),
        BatchRow(parse_scheme("nvfp4@16+handover=off"), prompt=30),
        BatchRow(parse_scheme("fp32")),
    ]
    with attach(model, rows) as session:
        out = logits(model, token_ids(60, rows=3))
        assert [counted[:2] for counted in session.flushes.values()] == [[2, 1]] * 2
    # Token 29, the prompt's last, reads the unrounded state; the hand-over shows from token 30 on, a flush from 46 on.
    scale = 1e-5 * out.abs().max()
    assert (out[0, :30] - out[2, :30]).abs().max() <= scale
    assert (out[0, 30] - out[2, 30]).abs().max() > scale
    assert (out[1, :46] - out[2, :46]).abs().max() <= scale
    assert (out[1, 46] - out[2, 46]).abs().max() > scale


def test_bfloat16_models_keep_an_fp32_state_and_say_so() -> None:
    """S1: the manifest reads dtypes back from the live state and cache."""
    model = nemotron_h("M-M*", torch.bfloat16)
    with attach(model, ["fp32", "nvfp4/fp16@16"]) as session:
        cache = DynamicCache(config=model.config)
        logits(model, token_ids(40, rows=2), cache=cache)
        manifest = session.manifest(cache)
    assert [entry["layer"] for entry in manifest] == [0, 2]
    for entry in manifest:
        assert entry["state_held_in"] == ["float32"]
        assert entry["records"] == {"v": "bfloat16", "k": "bfloat16", "beta": "float32", "log_decay": "float32"}
        assert entry["conv_state"] == "bfloat16"


def test_every_row_is_handed_the_same_inputs() -> None:
    """S2: in the first state layer, all rows get q, k, v, β and decay of equal bits, and Δ is never rounded to bf16."""
    seen = {}
    model = nemotron_h("M-M*", torch.bfloat16)
    with (
        attach(model, ["fp32", "nvfp4@16"], probe=False) as session,
        session.observed(lambda layer, inputs, o: seen.setdefault(layer, inputs)),
    ):
        logits(model, token_ids(40, rows=2))
    assert all(torch.equal(x[0], x[1]) for x in seen[0])
    beta = seen[0].beta
    assert beta.dtype == torch.float32
    assert not torch.equal(beta, beta.bfloat16().float())


def module_of(model):
    return importlib.import_module(FAMILIES[model.config.model_type].modeling)


@pytest.mark.parametrize("error", [None, ValueError], ids=["clean", "after-an-error"])
def test_everything_is_put_back(model, error) -> None:
    module = module_of(model)
    before, hooks = dict(vars(module)), [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()]
    try:
        with attach(model, ["fp32"]):
            assert vars(module) != before
            if error:
                raise error
    except ValueError:
        pass
    assert vars(module) == before
    assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()] == hooks


def test_a_bypassed_hook_stops_the_run(model) -> None:
    """P5: a fast path that goes around the recurrence function is an error, not a result with KL 0."""
    layer, mixer = next(iter(state_layers(model).items()))
    with attach(model, ["fp32"], probe=False):
        mixer.forward = lambda hidden_states, **_: hidden_states
        try:
            with pytest.raises(RunError, match=rf"state hook did not run .*\[{layer}\]"):
                logits(model, token_ids(8))
        finally:
            del mixer.forward


def test_the_probe_catches_a_state_that_restarts(model, monkeypatch) -> None:
    """P1: a cached forward that starts from zero again is refused at start-up, with the transformers version."""
    from replayssm_eval.inference.session import Session

    original = Session.scan

    def forgetful(self, q, k, v, beta, log_decay, state):
        return original(self, q, k, v, beta, log_decay, None)

    monkeypatch.setattr(Session, "scan", forgetful)
    with pytest.raises(RunError, match="start-up probe.*two chunks.*transformers"), attach(model, ["fp32"]):
        pass


def test_wrong_batch_is_named() -> None:
    with (
        attach(nemotron_h("M-M*"), ["fp32", "nvfp4@16"]) as _,
        pytest.raises(UsageError, match="batch 3, but 2 schemes"),
    ):
        logits(nemotron_h("M-M*"), token_ids(8, rows=3))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (mamba1, "Mamba-1.*decay differs for every state element"),
        (lambda: nemotron_h("*-"), "no state layer"),
        (lambda: nemotron_h("M-M*").train(), "training mode"),
    ],
    ids=["mamba-1", "no-state-layers", "training"],
)
def test_unsuitable_models_are_refused(make, says) -> None:
    try:
        with pytest.raises(UsageError, match=says), attach(make(), ["fp32"]):
            pass
    finally:
        nemotron_h("M-M*").eval()


def test_sessions_do_not_nest(model) -> None:
    with attach(model, ["fp32"]), pytest.raises(UsageError, match="another session"), attach(model, ["fp32"]):
        pass
    with pytest.raises(UsageError, match="no scheme"), attach(model, []):
        pass


@pytest.mark.parametrize("broken_layer", [0, 2])
def test_a_layer_that_is_not_rounded_is_found(broken_layer, monkeypatch) -> None:
    """P5: roundings are counted where they happen, in every layer, and so is whether they change anything."""
    import replayssm_kernels.torch_backend.groups as scan

    original = scan.scan_group

    def without_casts(*args):
        monkeypatch.setattr(scan, "plan_casts", (lambda *_: []) if args[-2] == broken_layer else casts)
        return original(*args)

    casts = scan.plan_casts
    monkeypatch.setattr(scan, "scan_group", without_casts)
    with attach(nemotron_h("M-M*"), ["fp32", "nvfp4@16"], probe=False) as session:
        logits(nemotron_h("M-M*"), token_ids(40, rows=2))
        with pytest.raises(RunError, match=rf"state layer {broken_layer}: 2 roundings to nvfp4 .* changed nothing"):
            session.check_rounding([2, 2])
        with pytest.raises(RunError, match="rounded .2, 2. times .* where .3, 3. was due"):
            session.check_rounding([3, 3])


def test_every_layer_and_document_has_its_own_noise() -> None:
    """The state of each layer equals the reference recurrence under that layer's and document's key, bit for bit."""
    from replayssm_emulation import NoiseKey, fixed_window, recurrence_windows

    model, rows = nemotron_h("M-M*"), [BatchRow(parse_scheme("fp16@16"), seed=3, document=5)]
    seen = {}
    with attach(model, rows, probe=False) as session:
        with session.observed(lambda layer, inputs, o: seen.update({layer: inputs})):
            logits(model, token_ids(48))
        for layer, (q, k, *rest) in seen.items():
            q, k = (x[0].float().repeat_interleave(2, dim=1) for x in (q, k))
            trace = recurrence_windows(
                q, k, *(x[0].float() for x in rest), rows[0].scheme, fixed_window(16, 0, 48), key=NoiseKey(3, 5, layer)
            )
            group = session.states.groups(layer)[0]
            # The fold's roundoff (1e-7) tips one element in thousands; another key would move nearly all of them.
            assert (group.recurrence[0] != trace.copies[-1][1]).float().mean() < 0.02


def test_a_pass_after_a_failed_one_works(model) -> None:
    ids = token_ids(20)
    with attach(model, ["fp32"]) as session:
        expected = logits(model, ids)
        head = model.get_output_embeddings()
        hook = state_layers(model)[session.layers[-1]].register_forward_pre_hook(
            lambda *_: (_ for _ in ()).throw(MemoryError())
        )
        with pytest.raises(MemoryError):
            logits(model, ids)
        hook.remove()
        assert torch.equal(logits(model, ids), expected)
        assert head is model.get_output_embeddings()


@pytest.mark.parametrize("fault", ["no decay", "decay x 1.3", "beta x 1.05"])
def test_the_probe_compares_with_the_unpatched_model(model, fault, monkeypatch) -> None:
    """A wrong input mapping agrees with itself; only the unpatched model can tell."""
    from replayssm_eval.inference.session import Session

    original = Session.scan
    factors = {"no decay": (1.0, 0.0), "decay x 1.3": (1.0, 1.3), "beta x 1.05": (1.05, 1.0)}[fault]

    def wrong(self, q, k, v, beta, log_decay, state):
        return original(self, q, k, v, beta * factors[0], log_decay * factors[1], state)

    monkeypatch.setattr(Session, "scan", wrong)
    with pytest.raises(RunError, match="one pass and the unpatched model differ"), attach(model, ["fp32"]):
        pass


@pytest.mark.interpreter
def test_the_triton_scan_serves_a_model(no_grad) -> None:
    """The start-up check has both scans read the same text; the rows then drift as with the torch scan."""
    model = deepcopy(tiny_nemotron_h()).to(DEVICE)
    ids = token_ids(40).expand(3, -1).to(DEVICE)
    schemes = ["fp32", "fp32", "nvfp4/fp16@16"]
    with attach(model, schemes, backend="torch") as session:
        expected = logits(model, ids)
    with attach(model, schemes, backend="triton") as session:
        assert session.backend == "triton"
        got = logits(model, ids)
        session.check_rounding([2, 2, 2])
    assert torch.equal(got[0], got[1])
    assert (got[0] - expected[0]).abs().max() <= 1e-5 * expected[0].abs().max()
    drift, reference = (got[2] - got[0]).norm(), (expected[2] - expected[0]).norm()
    assert drift.item() == pytest.approx(reference.item(), rel=0.02)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.interpreter
def test_a_triton_scan_that_computes_something_else_is_refused(layer, monkeypatch) -> None:
    from replayssm_kernels.triton_backend import launch as scan_triton

    original = scan_triton.scan_groups

    def wrong(q, k, v, beta, log_decay, o, groups, rows, start, at, delta):
        original(q, k, v, beta, log_decay, o, groups, rows, start, at, delta)
        if at == layer and rows[-1].scheme.recurrence.lossy:  # rows of the run, not of the probe
            o[-1] *= 1.01

    monkeypatch.setattr(scan_triton, "scan_groups", wrong)
    with (
        pytest.raises(RunError, match=f"state layer {layer}, nvfp4/fp16@16: .*% of the Triton scan's outputs differ"),
        attach(deepcopy(tiny_nemotron_h()).to(DEVICE), ["fp32", "nvfp4/fp16@16"], backend="triton"),
    ):
        pass


def test_following_the_clamp_is_the_same_for_every_chunking() -> None:
    """Both recurrence functions clamp, or neither: a chunk of one token must not change the model."""
    model = nemotron_h("M-M*")
    with attach(model, ["fp32"], follow_hf_clamp=True):
        ids = token_ids(24)
        assert (logits(model, ids) - logits(model, ids, (1,) * 24)).abs().max() <= 1e-4


def test_delta_rule_options_are_refused_where_there_is_no_delta_rule(model) -> None:
    with (
        pytest.raises(UsageError, match="fold=stored is a choice of delta-rule models"),
        attach(model, ["nvfp4@16+fold=stored"]),
    ):
        pass


def test_gradients_are_refused_in_one_line(model) -> None:
    with torch.enable_grad(), attach(model, ["fp32"]), pytest.raises(UsageError, match="inference_mode"):
        model(input_ids=token_ids(8).clone(), use_cache=False)
    with pytest.raises(UsageError, match=r"not dict .*pass \.model"), attach({}, ["fp32"]):
        pass
