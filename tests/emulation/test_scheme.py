"""The text form of schemes, its canonical spelling, and schedules."""

import pytest
from replayssm_emulation import PRESETS, UsageError, fixed_window, parse_scheme
from replayssm_emulation.schedule import folds, segments

CANONICAL = {
    "fp32": "fp32",
    "fp32@16": "fp32",
    "fp32@1": "fp32@1",
    "nvfp4": "nvfp4@16",
    "nvfp4-sr@16": "nvfp4@16",
    "nvfp4-rn@16": "nvfp4-rn@16",
    "fp8@1": "fp8@1",
    "nvfp4/fp16@16": "nvfp4/fp16@16",
    "nvfp4-rn/fp16-sr": "nvfp4/fp16@16",
    "nvfp4-sr/fp16-rn@4": "nvfp4-sr/fp16-rn@4",
    "fp8/fp32@16": "fp8/fp32@16",
    "fp32/nvfp4@16": "fp32/nvfp4@16",
    "int4-b32@8": "int4-b32@8",
    "nvfp4/fp16@16+fold=stored+records=bf16": "nvfp4/fp16@16+records=bf16+fold=stored",
    "nvfp4@16+handover=on": "nvfp4@16",
    "fp16@1+noise-bits=13": "fp16@1+noise-bits=13",
    " nvfp4@16 ": "nvfp4@16",
    "vllm-fp16-sr": "fp16@1+noise-bits=13",
}


@pytest.mark.parametrize(("text", "canonical"), CANONICAL.items())
def test_one_canonical_spelling(text, canonical) -> None:
    scheme = parse_scheme(text)
    assert str(scheme) == canonical
    assert parse_scheme(str(scheme)) == scheme


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_parse(preset) -> None:
    assert parse_scheme(preset) == parse_scheme(PRESETS[preset][0])


def test_default_rounding_follows_the_role() -> None:
    separate = parse_scheme("nvfp4/fp16")
    assert (separate.read.rounding, separate.recurrence.rounding) == ("nearest", "stochastic")
    assert parse_scheme("nvfp4").recurrence.rounding == "stochastic"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("nvfp5@16", "nvfp5"),
        ("nvfp4@0", "L=0"),
        ("nvfp4@-1", "'-1'"),
        ("nvfp4@", "window ''"),
        ("nvfp4@x", "'x'"),
        ("nvfp4@²", "'²'"),
        ("a/b/c@16", "3 copies"),
        ("/fp16@16", "unknown format ''"),
        ("nvfp4/@16", "unknown format ''"),
        ("", "unknown format ''"),
        ("fp32-sr@16", "never rounded"),
        ("nvfp4@16+fold", "'fold'"),
        ("nvfp4@16+fold=maybe", "exact, stored"),
        ("nvfp4@16+fold=stored+fold=exact", "twice"),
        ("nvfp4@16+noise-bits=33", "1 to 32"),
        ("nvfp4@16+colour=red", "colour=red"),
        ("nvfp4@16+cast=chained", "has one"),
        ("nvfp4@16+flush-reads=read", "has one"),
    ],
)
def test_a_bad_scheme_is_one_line_that_names_the_part(text, part) -> None:
    with pytest.raises(UsageError) as caught:
        parse_scheme(text)
    message = str(caught.value)
    assert part in message
    assert repr(text) in message
    assert "\n" not in message


def test_fixed_window_counts_from_the_end_of_the_prompt() -> None:
    assert fixed_window(16, 0, 33) == [15, 31]
    assert fixed_window(16, 5, 37) == [20, 36]
    assert fixed_window(1, 3, 6) == [3, 4, 5]
    assert fixed_window(16, 0, 15) == []
    with pytest.raises(UsageError, match="L=0"):
        fixed_window(0, 0, 5)


@pytest.mark.parametrize("decoded", [0, 1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("prompt", [5, 16])
def test_flush_count_is_decoded_tokens_over_the_window(prompt, decoded) -> None:
    """R1: floor(T / 16) flushes, wherever the prompt ended; the hand-over is one more rounding, at the prompt's end."""
    stop = prompt + decoded
    rounded = [p for p, is_rounded in folds(fixed_window(16, prompt, stop), prompt, True, 0, stop) if is_rounded]
    assert rounded[0] == prompt - 1
    assert len(rounded) - 1 == decoded // 16


def test_segments_refuse_an_impossible_schedule() -> None:
    assert segments([2, 3], 0, 6) == [(0, 3, True), (3, 4, True), (4, 6, False)]
    for bad in ([3, 3], [3, 2], [6], [-1]):
        with pytest.raises(UsageError, match="flush position"):
            segments(bad, 0, 6)
