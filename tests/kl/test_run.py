"""Whole runs on the shipped testbed: schema, exactness, repeatability, and one clear line for every failure."""

import itertools
import json
import math
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from replayssm_emulation import RunError, UsageError
from safetensors import safe_open

from replayssm_eval import run_kl
from replayssm_eval.kl import checkpoint, reading
from replayssm_eval.kl import run as kl_module
from replayssm_eval.kl.run import OUTPUT_FILES, KlOptions
from replayssm_eval.models.loading import Loaded, load
from tests.helpers.models import VOCAB, nemotron_h

SCHEMES = ("nvfp4@16", "nvfp4/fp16@16")
TOKENS = 1100


@pytest.fixture(autouse=True)
def saved_after_every_chunk(monkeypatch):
    """However slow the machine is: by itself, a run saves its state less often when saving takes long."""
    monkeypatch.setattr(checkpoint, "_SHARE_OF_RUN", math.inf)


@pytest.fixture(scope="session")
def testbed():
    return load("tiny-mamba2")


@pytest.fixture(scope="session")
def run(testbed, tmp_path_factory):
    """A function that runs the testbed once per set of options."""
    done = {}

    def once(**options):
        key = str(sorted(options.items()))
        if key not in done:
            folder = tmp_path_factory.mktemp("run") / "out"
            done[key] = (
                run_kl(
                    KlOptions(**{"schemes": SCHEMES, "tokens": TOKENS, "chunk_size": 512, **options}),
                    output=folder,
                    loaded=testbed,
                ),
                folder,
            )
        return done[key]

    return once


def per_token(folder, column):
    """Scheme and seed -> array over positions, for one book."""
    table = pq.read_table(folder / "kl.parquet").to_pandas()
    return {
        key[:2]: group.sort_values("position")[column].to_numpy()
        for key, group in table.groupby(["scheme", "seed", "role", "book"], observed=True)
    }


def test_the_result_follows_its_schema(run) -> None:
    result, folder = run()
    written = json.loads((folder / "kl.json").read_text())
    assert sorted(p.name for p in folder.iterdir()) == sorted(OUTPUT_FILES)
    assert written["schema"] == "replayssm-eval/kl@1"
    assert written["status"] == "complete"
    assert written["tokens"] == TOKENS
    assert written["bins"] == [[0, 1024], [1024, TOKENS]]
    assert written["control"] == {"kl_max": 0.0}
    assert [(r["role"], r["scheme"]) for r in written["rows"]] == [
        ("reference", "fp32"),
        ("control", "fp32"),
        *(("scheme", s) for s in SCHEMES),
    ]
    for row in written["rows"]:
        assert len(row["kl_mean"]) == len(row["kl_ci95"]) == len(row["same_top1"]) == len(row["nll"]) == 2
        assert row["nonfinite"] == 0
        assert row["flushes"] == TOKENS // 16
        assert {"kl", "kl_median", "kl_p99", "kl_p999", "kl_max", "seed"} <= row.keys()
    assert [entry["layer"] for entry in written["model"]["state_layers"]] == [0, 1, 3, 4, 6, 7]
    assert sum(written["entropy_buckets"]["tokens"]) == TOKENS
    assert result["output"] == str(folder)
    assert "<svg" in (folder / "report.html").read_text()
    assert (folder / "kl.png").read_bytes().startswith(b"\x89PNG")


def test_the_json_agrees_with_the_per_token_file(run) -> None:
    result, folder = run()
    for row in result["rows"][2:]:
        series = per_token(folder, "kl")[row["scheme"], row["seed"]].astype(np.float64)
        assert row["kl"] == pytest.approx(series.mean(), rel=1e-9)
        assert row["kl_mean"] == [pytest.approx(series[:1024].mean()), pytest.approx(series[1024:].mean())]
        assert row["kl_max"] == series.max()
        assert (series[:16] < 1e-9).all()  # nothing is rounded before the first flush
        assert series[16:].max() > 1e-4


@pytest.mark.slow
def test_decoding_token_by_token_gives_the_same_curve(testbed, tmp_path) -> None:
    """The same noise in both engines. fp32 roundoff tips single elements: tokens may differ, the mean hardly."""
    schemes = ["nvfp4@16", "fp8@5", "nvfp4/fp16@16"]
    scan, decode = (
        run_kl(
            schemes=schemes,
            tokens=160,
            prompt_tokens=20,
            chunk_size=64,
            engine=engine,
            output=tmp_path / engine,
            loaded=testbed,
        )
        for engine in ("scan", "decode")
    )
    assert decode["options"]["engine"] == "decode"
    assert decode["control"]["kl_max"] == 0.0
    for one, other in zip(scan["rows"][2:], decode["rows"][2:], strict=True):
        assert one["flushes"] == other["flushes"] > 0
        assert one["kl"] == pytest.approx(other["kl"], rel=0.02), one["scheme"]


@pytest.mark.parametrize("engine", ["scan", "decode"])
@pytest.mark.parametrize("threads", [1, 2, 3, 4, 8])
@pytest.mark.slow
def test_the_control_is_exactly_zero_with_any_number_of_threads(testbed, tmp_path, threads, engine) -> None:
    """Odd numbers of tokens: the part of a thread ends inside a row, and vectors end where nothing is aligned."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        tokens, chunk = (333, 257) if engine == "scan" else (20, 7)
        options = KlOptions(schemes=["nvfp4@16"], tokens=tokens, chunk_size=chunk, engine=engine)
        result = run_kl(options, output=tmp_path / "out", loaded=testbed)
    finally:
        torch.set_num_threads(before)
    assert result["control"]["kl_max"] == 0


def test_shared_state_drifts_more_than_separate_copies(run) -> None:
    result, _ = run()
    shared, separate = result["rows"][2:]
    assert shared["kl"] > 2 * separate["kl"] > 0


@pytest.mark.slow
def test_two_runs_are_byte_identical(run, testbed, tmp_path) -> None:
    _, folder = run()
    run_kl(KlOptions(schemes=SCHEMES, tokens=TOKENS, chunk_size=512), output=tmp_path / "again", loaded=testbed)
    assert (tmp_path / "again" / "kl.parquet").read_bytes() == (folder / "kl.parquet").read_bytes()
    assert (tmp_path / "again" / "kl.svg").read_bytes() == (folder / "kl.svg").read_bytes()


@pytest.mark.parametrize(
    "change",
    [{"chunk_size": 2048}, {"chunk_size": 300}, {"schemes": SCHEMES[::-1]}, {"schemes": (*SCHEMES, "fp8@16")}],
    ids=str,
)
@pytest.mark.slow
def test_chunks_and_row_order_keep_the_noise(run, change) -> None:
    """The same rounding noise: per-token KL agrees to float rounding. A difference in the 7th digit of a fold tips an
    element over a boundary now and then, so single tokens may move by a little; the drift itself may not."""
    _, base = run()
    _, other = run(**change)
    expected, got = per_token(base, "kl"), per_token(other, "kl")
    for scheme in SCHEMES:
        a, b = expected[scheme, 0], got[scheme, 0]
        assert np.abs(a - b).mean() <= 0.01 * a.mean()


@pytest.mark.slow
def test_another_seed_is_another_noise_of_the_same_size(run) -> None:
    result, folder = run(seeds=(0, 1))
    rows = [(r["scheme"], r["seed"]) for r in result["rows"] if r["role"] == "scheme"]
    assert rows == [("nvfp4@16", 0), ("nvfp4@16", 1), ("nvfp4/fp16@16", 0), ("nvfp4/fp16@16", 1)]
    series = per_token(folder, "kl")
    a, b = series["nvfp4@16", 0], series["nvfp4@16", 1]
    assert np.corrcoef(a[16:], b[16:])[0, 1] < 0.99
    assert 0.5 < a.mean() / b.mean() < 2
    # Adding a seed does not change the rows of the other one (cf. row order).
    assert np.abs(a - per_token(run()[1], "kl")["nvfp4@16", 0]).mean() <= 0.01 * a.mean()


@pytest.mark.slow
def test_a_nearest_scheme_needs_no_second_seed(run) -> None:
    result, _ = run(schemes=("nvfp4-rn@16",), seeds=(5, 6), tokens=64)
    assert [(r["scheme"], r["seed"]) for r in result["rows"][2:]] == [("nvfp4-rn@16", 5)]


@pytest.mark.slow
def test_every_target_is_scored_once_across_chunk_borders(run, testbed) -> None:
    """NLL of the reference equals the unpatched model's, at every position and across chunk borders."""
    _, folder = run(follow_hf_clamp=True)
    from replayssm_eval.kl.corpus import load_books

    ids = torch.tensor(testbed.tokenizer(load_books("builtin")[0].text[:20000])["input_ids"][: TOKENS + 1])
    with torch.inference_mode():
        logits = testbed.model(input_ids=ids[None, :-1], use_cache=False).logits[0]
    expected = torch.nn.functional.cross_entropy(logits.double(), ids[1:], reduction="none")
    table = pq.read_table(folder / "kl.parquet").to_pandas()
    reference = table[table.role == "reference"].sort_values("position")
    np.testing.assert_allclose(reference.nll, expected, atol=2e-4)
    assert reference.token.tolist() == ids[:-1].tolist()


@pytest.mark.slow
def test_prompt_tokens_are_read_in_full_precision(run) -> None:
    result, folder = run(prompt_tokens=200, tokens=1600)
    series = per_token(folder, "kl")["nvfp4@16", 0].astype(np.float64)
    assert (series[:200] < 1e-9).all()
    assert series[200:].max() > 1e-5
    # A prompt cannot drift: it dilutes no mean, quantile or bin.
    assert result["bins"] == [[200, 1224], [1224, 1600]]
    row = result["rows"][2]
    assert row["kl"] == pytest.approx(series[200:].mean())
    assert row["kl_mean"] == [pytest.approx(series[200:1224].mean()), pytest.approx(series[1224:].mean())]
    assert row["kl_median"] == pytest.approx(np.median(series[200:]))
    assert sum(result["entropy_buckets"]["tokens"]) == 1400
    assert row["flushes"] == 1 + 1400 // 16


@pytest.mark.slow
def test_interrupted_and_resumed_equals_uninterrupted(run, testbed, tmp_path) -> None:
    _, folder = run(books=("moby-dick", "persuasion"))
    options = KlOptions(schemes=SCHEMES, tokens=TOKENS, chunk_size=512, books=("moby-dick", "persuasion"))
    seen = []

    def stop_in_the_second_book(progress):
        seen.append((progress.book, progress.done))
        if progress.book == "persuasion":
            raise KeyboardInterrupt

    result = run_kl(options, output=tmp_path / "out", loaded=testbed, progress=stop_in_the_second_book)
    assert result["status"] == "interrupted"
    assert json.loads((tmp_path / "out" / "kl.json").read_text())["status"] == "interrupted"
    first = len(seen)
    result = run_kl(
        options, output=tmp_path / "out", loaded=testbed, resume=True, progress=lambda p: seen.append((p.book, p.done))
    )
    assert result["status"] == "complete"
    assert seen[first:] == [("persuasion", TOKENS + 1024), ("persuasion", 2 * TOKENS)]
    assert (tmp_path / "out" / "kl.parquet").read_bytes() == (folder / "kl.parquet").read_bytes()
    assert not (tmp_path / "out" / "parts").exists()


def test_parts_of_another_run_are_not_mixed_in(testbed, tmp_path) -> None:
    def stop(progress):
        raise KeyboardInterrupt

    options = {"schemes": SCHEMES, "tokens": 128, "chunk_size": 64}
    run_kl(KlOptions(**options), output=tmp_path / "out", loaded=testbed, progress=stop)
    with pytest.raises(UsageError, match="other options"):
        run_kl(KlOptions(**{**options, "seeds": (1,)}), output=tmp_path / "out", loaded=testbed, resume=True)


def test_a_refused_resume_names_what_changed(tmp_path, monkeypatch) -> None:
    def stop(progress):
        raise KeyboardInterrupt

    run = partial(run_kl, schemes=["nvfp4@16"], chunk_size=64, output=tmp_path / "out")
    run(tokens=128, loaded=tiny(nemotron_h("M-M*")), progress=stop)
    with pytest.raises(UsageError, match="a run with other options, text, weights:"):
        run(tokens=192, loaded=tiny(nemotron_h("M-M-")), resume=True)
    digests = kl_module.code_digests
    monkeypatch.setattr(kl_module, "code_digests", lambda **rooms: digests(**rooms) | {"kernels": "other"})
    with pytest.raises(UsageError, match="a run with other code in kernels:"):
        run(tokens=128, loaded=tiny(nemotron_h("M-M*")), resume=True)


def test_an_output_folder_is_not_overwritten_unasked(run, testbed, tmp_path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    options = KlOptions(schemes=SCHEMES, tokens=64)
    with pytest.raises(UsageError, match="already holds a run: pass --overwrite"):
        run_kl(options, output=tmp_path, loaded=testbed)
    run_kl(options, output=tmp_path, loaded=testbed, overwrite=True)
    assert (tmp_path / "mine.txt").read_text() == "mine"
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file, not a folder"):
        run_kl(options, output=tmp_path / "file", loaded=testbed)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": 10_000_000}, r"moby_dick.*--tokens 10000000 is more than the book has: \d+ tokens"),
        ({"tokens": 1}, "--tokens 1: must be at least 2"),
        ({"chunk_size": 0}, "--chunk-size 0"),
        ({"prompt_tokens": 64}, "--prompt-tokens 64 leaves nothing"),
        ({"schemes": ("nvfp4@16", "nvfp4-sr@16")}, "nvfp4@16 is given twice"),
        ({"schemes": ()}, "no scheme"),
        ({"seeds": (-1,)}, "--seed -1"),
        ({"seeds": (1 << 64,)}, r"2\^64"),
        ({"seeds": (0, 0)}, "given twice"),
        ({"books": "moby-dick"}, "books is a string"),
        ({"schemes": "nvfp4@16"}, "schemes is a string"),
        ({"schemes": ("nvfp4@0",)}, "L=0"),
        ({"corpus": "/nowhere"}, "no such file"),
    ],
    ids=str,
)
def test_bad_options_leave_no_folder_behind(testbed, tmp_path, options, says) -> None:
    with pytest.raises(UsageError, match=says):
        run_kl(KlOptions(**{"schemes": SCHEMES, "tokens": 64, **options}), output=tmp_path / "out", loaded=testbed)
    assert not (tmp_path / "out").exists()


class Letters:
    """A tokenizer for the tiny random models: one token per character."""

    def __call__(self, text, **_):
        return {"input_ids": [ord(c) % VOCAB for c in text]}


def tiny(model):
    return Loaded(model, Letters(), {"name": "tiny-random", "type": "nemotron_h", "dtype": "float32", "device": "cpu"})


def test_nan_in_one_row_is_named_marked_and_kept_out(tmp_path, monkeypatch) -> None:
    """The row fails with its first position and layer; the other rows and the file stay valid."""
    import replayssm_eval.inference.session as session_module

    original = session_module.replay_scan

    def poison(*args, layer, **kwargs):
        o, carry = original(*args, layer=layer, **kwargs)
        if layer == 2 and carry.position == 64 and o.shape[1] == 32:
            o[2, 8:] = torch.nan
        return o, carry

    monkeypatch.setattr(session_module, "replay_scan", poison)
    result = run_kl(
        KlOptions(schemes=SCHEMES, tokens=128, chunk_size=32), output=tmp_path / "out", loaded=tiny(nemotron_h("M-M"))
    )
    assert result["status"] == "failed"
    assert len(result["problems"]) == 1
    assert "nvfp4@16 (seed 0) is not finite from position 40 on, first seen in state layer 2" in result["problems"][0]
    row = json.loads((tmp_path / "out" / "kl.json").read_text())["rows"][2]
    assert row["nonfinite"] == 24  # the outputs of tokens 40..63 were poisoned, the state was not
    assert math.isfinite(row["kl"])
    assert "Problem" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize("scheme", ["nvfp4@16", "nvfp4@8", "fp8@1", "nvfp4/fp32@16"])
def test_an_emulation_that_does_not_reach_the_state_stops_the_run(tmp_path, monkeypatch, scheme) -> None:
    """P5: KL 0, or roundoff, of a lossy scheme must never be a result."""
    import replayssm_kernels.torch_backend.groups as scan

    monkeypatch.setattr(scan, "quantize_with_noise", lambda x, *_: x.clone())
    with pytest.raises(RunError, match="changed nothing: the emulation did not run"):
        run_kl(KlOptions(schemes=(scheme,), tokens=64), output=tmp_path / "out", loaded=tiny(nemotron_h("M-M*")))


def test_a_kl_of_exactly_zero_is_not_a_result(tmp_path, monkeypatch) -> None:
    """P5: a lossy row that equals the reference everywhere means a broken comparison, even with rounded states."""
    original = reading.compare_hidden
    monkeypatch.setattr(reading, "compare_hidden", lambda hidden, *rest: original(hidden[:1].expand_as(hidden), *rest))
    result = run_kl(
        KlOptions(schemes=("nvfp4@16",), tokens=64), output=tmp_path / "out", loaded=tiny(nemotron_h("M-M*"))
    )
    assert result["status"] == "failed"
    assert "nvfp4@16 (seed 0): KL is exactly 0 on all tokens" in result["problems"][0]


def test_options_that_round_nothing_are_no_failure(tmp_path) -> None:
    """records=bf16 on bf16 activations is a no-op; a window longer than the text is said, not failed."""
    model = tiny(nemotron_h("M-M*", torch.bfloat16))
    options = KlOptions(schemes=("fp32+records=bf16", "nvfp4@256"), tokens=64)
    result = run_kl(options, output=tmp_path / "out", loaded=model)
    assert result["status"] == "complete"
    assert "nvfp4@256 was never rounded" in (tmp_path / "out" / "report.md").read_text()


def test_keywords_win_over_options(tmp_path) -> None:
    result = run_kl(
        KlOptions(schemes=("nvfp4@16",), tokens=128),
        tokens=64,
        output=tmp_path / "out",
        loaded=tiny(nemotron_h("M-M*")),
    )
    assert result["tokens"] == 64
    assert json.loads(json.dumps(result))["rows"][2]["scheme"] == "nvfp4@16"


def test_overwriting_waits_until_the_inputs_are_good(tmp_path) -> None:
    model = tiny(nemotron_h("M-M*"))
    options = KlOptions(schemes=("nvfp4@16",), tokens=64)
    run_kl(options, output=tmp_path / "out", loaded=model)
    (tmp_path / "out" / "parts").mkdir()
    (tmp_path / "out" / "parts" / "mine.txt").write_text("mine")
    before = (tmp_path / "out" / "kl.json").read_bytes()
    with pytest.raises(UsageError, match="more than the book has"):
        run_kl(options, tokens=99_999_999, output=tmp_path / "out", loaded=model, overwrite=True)
    assert (tmp_path / "out" / "kl.json").read_bytes() == before
    run_kl(options, output=tmp_path / "out", loaded=model, overwrite=True)
    assert (tmp_path / "out" / "parts" / "mine.txt").read_text() == "mine"


def test_a_state_saved_on_the_way_is_that_of_its_position(tmp_path, monkeypatch) -> None:
    """P4: after 512 of 640 tokens (8 chunks of 64, 4 of 128) the saved state is that of a run cut at 512."""
    monkeypatch.setattr(kl_module, "kl_figure", lambda *_: {"png": b"", "svg": b"<svg"})  # what takes longest
    run = partial(run_kl, schemes=["nvfp4@16"], tokens=640, loaded=tiny(nemotron_h("M-M*")))

    def kill(progress):
        if progress.done == 512:
            raise KeyboardInterrupt

    saved = {}
    for size in (512, 64, 128):
        run(chunk_size=size, output=tmp_path / str(size), progress=kill)
        with safe_open(tmp_path / str(size) / "parts" / "state.safetensors", "pt") as file:
            saved[size] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert saved[size].keys() == saved[512].keys()
        for name in (n for n, tensor in saved[512].items() if n.endswith((".recurrence", ".read", ".conv", ".keys"))):
            off = ((saved[size][name] - saved[512][name]).abs() > 1e-4 * saved[512][name].abs().max()).float()
            assert not off[:2].any(), (
                name
            )  # reference and control; roundoff tips one element in thousands of a rounded copy
            assert off.mean() < 0.02, name
    result = run(chunk_size=64, output=tmp_path / "64", resume=True)
    assert [row["flushes"] for row in result["rows"]] == [40, 40, 40]
    assert "| flushes of each layer | | | | 40 |" in (tmp_path / "64" / "report.md").read_text()


def test_slow_saves_are_skipped_and_the_run_resumes_from_an_older_one(tmp_path, monkeypatch) -> None:
    """The clock advances by a second at every look: a save of one second is followed by none for twenty seconds."""
    ticks = itertools.count()
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: float(next(ticks)))
    monkeypatch.setattr(checkpoint, "_SHARE_OF_RUN", 1 / 20)
    run = partial(run_kl, schemes=["nvfp4@16"], tokens=640, chunk_size=64, loaded=tiny(nemotron_h("M-M*")))
    seen = []

    def kill(progress):
        seen.append(progress.done)
        if progress.done == 256:
            raise KeyboardInterrupt

    run(output=tmp_path / "out", progress=kill)
    run(output=tmp_path / "out", resume=True, progress=lambda p: seen.append(p.done))
    assert seen[4] == 128  # the first save is that after 64 tokens; the next three were skipped
    assert seen[4:] == list(range(128, 641, 64))
    run(output=tmp_path / "whole")
    assert (tmp_path / "out" / "kl.parquet").read_bytes() == (tmp_path / "whole" / "kl.parquet").read_bytes()


def test_titles_are_text_everywhere(tmp_path) -> None:
    """HTML, mathtext and markup in a title are shown, not interpreted."""
    book = tmp_path / "books.jsonl"
    book.write_text(json.dumps({"title": "<script>alert(1)</script> $\\x$ [/b] | a", "text": "once upon a time " * 10}))
    run_kl(
        KlOptions(schemes=("nvfp4@16",), tokens=64, corpus=str(book)),
        output=tmp_path / "out",
        loaded=tiny(nemotron_h("M-M*")),
    )
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_damaged_parts_and_finished_runs_are_refused(testbed, tmp_path) -> None:
    """K4: a cut file is refused, never half read."""

    def stop(progress):
        raise KeyboardInterrupt

    options = KlOptions(schemes=SCHEMES, tokens=96, chunk_size=64)
    run_kl(options, output=tmp_path / "out", loaded=testbed, progress=stop)
    state = tmp_path / "out" / "parts" / "state.safetensors"
    whole = state.read_bytes()
    for path in (state, tmp_path / "out" / "parts" / "00000-00000000.npz"):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(UsageError, match=f"{path.name} is damaged"):
            run_kl(options, output=tmp_path / "out", loaded=testbed, resume=True)
        state.write_bytes(whole)
    (tmp_path / "out" / "parts" / "00000-00000000.npz").unlink()
    assert run_kl(options, output=tmp_path / "out", loaded=testbed, resume=True)["status"] == "complete"
    with pytest.raises(UsageError, match="nothing to resume"):
        run_kl(options, output=tmp_path / "out", loaded=testbed, resume=True)


def test_the_figure_shows_numbers_not_markup(run) -> None:
    """Tick labels are text that a reader can read, in the picture and in the page that holds it."""
    import re

    svg = re.sub(r"<!--.*?-->", "", (run()[1] / "kl.svg").read_text(), flags=re.S)
    assert "mathdefault" not in svg
    assert "nvfp4/fp16@16" in svg
