"""The store of states: caches of other sequences, saving, reordering, and counting of replayed windows."""

import pytest
import torch
from replayssm_emulation import RunError, parse_scheme
from replayssm_kernels import BatchRow, Carry, replay_scan
from torch import Tensor

from replayssm_eval.inference.run_checks import FiniteWatch, PassWatch
from replayssm_eval.inference.states import States, lengthen

ROWS = [BatchRow(parse_scheme(text)) for text in ("fp32@4", "fp8@4", "nvfp4/fp16@4")]
LAYERS = (1, 3)


def scanned(carry: Carry | None, start: int, stop: int, rows=ROWS) -> tuple[Tensor, Carry]:
    """(o, carry) of tokens [start, stop) of one text, alike for all rows."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 40, 1, 12, generator=g)
    v = torch.randn(1, 40, 2, 10, generator=g)
    beta, log_decay = torch.rand(2, 1, 40, 2, generator=g)
    inputs = (x[:, start:stop].expand(len(rows), *x[:, start:stop].shape[1:]) for x in (q, k, v, beta, -log_decay))
    return replay_scan(*inputs, rows, carry, layer=0)


def after(tokens: int, rows=ROWS) -> States:
    """States of two layers that have seen this many tokens."""
    states = States()
    for layer in LAYERS:
        states.begin(layer)
        states.keep(layer, scanned(None, 0, tokens, rows)[1])
    return states


def token(states: States, layer: int, tokens: int) -> Tensor:
    token = states.first_token(layer, len(ROWS), torch.device("cpu"))
    lengthen(token, tokens)
    return token


def test_only_the_token_of_the_last_scan_is_gone_on_from() -> None:
    states = after(10)
    assert states.layers == list(LAYERS)
    assert states.tokens == 10
    right = token(states, 1, 10)
    assert states.carry(1, right) is not None
    assert states.carry(1, token(states, 1, 9)) is None, "a chunk was repeated"
    assert states.carry(3, right) is None, "the token of another layer's sequence"
    assert states.carry(2, right) is None, "a layer without a state"
    states.begin(1)
    assert states.carry(1, right) is None, "another sequence has begun"
    states.clear()
    assert (states.layers, states.tokens) == ([], 0)


def test_restored_states_go_on_bit_for_bit() -> None:
    states, restored = after(10), States()
    tensors, facts = states.export()
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    as_json = {"layers": {str(layer): saved for layer, saved in facts["layers"].items()}}
    restored.restore(copies, as_json, dict.fromkeys(LAYERS, torch.device("cpu")))
    for layer in LAYERS:
        old, new = (s.carry(layer, token(states, layer, 10)) for s in (states, restored))
        assert torch.equal(scanned(new, 10, 21)[0], scanned(old, 10, 21)[0])
    assert restored.by_row("flushes") == states.by_row("flushes") == {layer: [5, 5, 5] for layer in LAYERS}
    restored.begin(1)
    assert restored.carry(1, token(states, 1, 21)) is None, "a serial number was given twice"


def test_reordered_rows_go_on_as_they_were() -> None:
    states, order = after(10), [2, 0, 2]
    expected = scanned(after(10).carry(1, token(states, 1, 10)), 10, 21)[0]
    states.reorder(order)
    got = scanned(states.carry(1, token(states, 1, 10)), 10, 21, [ROWS[i] for i in order])[0]
    assert torch.equal(got, expected[order])


def test_windows_are_counted_and_rewound() -> None:
    states = after(8)
    assert states.at_window_start()
    states.advance(3, window=4)
    assert states.tokens == 20
    assert states.by_row("flushes") == {layer: [5, 5, 5] for layer in LAYERS}
    states.advance(-3, window=4)
    assert states.tokens == 8
    assert states.by_row("flushes") == {layer: [2, 2, 2] for layer in LAYERS}
    assert not after(9).at_window_start()


def test_rows_are_common_only_if_all_fold_together() -> None:
    assert sorted(after(8).common_rows() or []) == [0, 1, 2]
    mixed = [*ROWS, BatchRow(parse_scheme("fp8@2"))]
    assert after(8, mixed).common_rows() is None
    assert States().common_rows() is None


def test_scans_that_computed_nothing_are_undone() -> None:
    """As after a capture: positions, records and flushes are those of before."""
    states = after(8)
    saved = states.snapshot()
    copies = [group.recurrence.clone() for group in states.groups(1)]
    carry = states.carry(1, token(states, 1, 8))
    scanned(carry, 8, 11)
    assert not states.at_window_start()
    states.put_back(saved)
    assert states.at_window_start()
    assert states.carry(1, token(states, 1, 8)) is carry
    assert all(torch.equal(group.recurrence, copy) for group, copy in zip(states.groups(1), copies, strict=True))


def test_the_lowest_layer_that_is_not_finite_is_named() -> None:
    watch, o = FiniteWatch(), torch.zeros(3, 5, 2, 10)
    bad = o.clone()
    bad[1, 4, 0, 9] = torch.nan
    for layer, outputs in ((3, bad), (1, o), (2, bad)):
        watch.note(layer, outputs)
    assert [watch.first_nonfinite_layer(row) for row in range(3)] == [None, 2, None]
    watch.reorder([1, 2])
    assert [watch.first_nonfinite_layer(row) for row in range(2)] == [2, None]
    watch.note(2, o[:2])
    assert watch.first_nonfinite_layer(0) == 3
    watch.clear()
    assert watch.first_nonfinite_layer(0) is None


@pytest.mark.parametrize(("scans", "named"), [((1,), "3"), ((1, 3, 3), "1, 3, 3")], ids=["too-few", "too-many"])
def test_every_layer_scans_once_a_pass(scans, named) -> None:
    watch = PassWatch(LAYERS)
    with pytest.raises(RunError, match="ran outside its mixer"):
        watch.scanned()
    for wanted in (LAYERS, scans):
        watch.begin()
        for layer in wanted:
            watch.enter(layer)
            watch.scanned()
        if wanted == LAYERS:
            watch.end()
    with pytest.raises(RunError, match=rf"did not run exactly once in layers \[{named}\]"):
        watch.end()
