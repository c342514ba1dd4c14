"""A quartiles run: sample logs in, quartiles.json and its report, figure and per-question records out."""

import datetime
import io
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from replayssm_emulation import UsageError

from ..results import files as results
from ..results.provenance import provenance
from . import pairing
from .comparison import SCHEMA, Arm, assign_bins, compare
from .records import Record, choose_metric, records
from .sample_log import Log, choose_filter, clean, read_log

_MOST_BINS = 100


def run_quartiles(
    reference: Path | str,
    variants: Sequence[Path | str] = (),
    *,
    controls: Sequence[str] = (),
    names: Sequence[str] = (),
    task: str | None = None,
    filter_name: str | None = None,
    metric: str | None = None,
    tokenizer: str | None = None,
    bins: int = 4,
    allow_cut: bool = False,
    output: Path | str | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Compare the answers of sample logs by the reference's answer length; write the output folder.

    reference, variants: sample files or folders. controls: names among the variants, or further files and folders.
    names: names of the arms in that order; by default those of their files or folders.
    task, filter_name, metric: which samples and which score.
    tokenizer: counts tokens where none are recorded. bins: how many. allow_cut: leave out a cut last line.
    Returns what quartiles.json holds, and "output". Raises UsageError for what the logs or options do not allow.
    """
    started = datetime.datetime.now(datetime.UTC)
    if output is not None:
        results.check_output(Path(output), overwrite, None)
    result, table = evaluate(
        [Path(reference), *map(Path, variants)],
        controls=controls,
        names=names,
        task=task,
        filter_name=filter_name,
        metric=metric,
        tokenizer=tokenizer,
        bins=bins,
        allow_cut=allow_cut,
    )
    folder = (
        Path(output)
        if output is not None
        else results.default_output("quartiles", re.sub(r"[^\w.-]+", "-", result["task"]))
    )
    results.check_output(folder, overwrite, None)
    result = results.jsonable({**result, "provenance": provenance(started)})
    _write(folder, result, table)
    return {**result, "output": str(folder)}


def evaluate(
    paths: Sequence[Path],
    *,
    controls: Sequence[str] = (),
    names: Sequence[str] = (),
    task: str | None = None,
    filter_name: str | None = None,
    metric: str | None = None,
    tokenizer: str | None = None,
    bins: int = 4,
    allow_cut: bool = False,
) -> tuple[dict[str, Any], bytes]:
    """(quartiles.json without provenance, quartiles.parquet) of the logs `paths`, reference first. Writes nothing."""
    if not 1 <= bins <= _MOST_BINS:
        raise UsageError(f"--bins {bins}: use 1 to {_MOST_BINS}")
    paths, roles, names = _arms(list(paths), controls, names)
    logs = [read_log(path, name, task, allow_cut) for path, name in zip(paths, names, strict=True)]
    _refuse_the_same_file(logs)
    chosen_filter = choose_filter(logs, filter_name)
    chosen_metric = choose_metric(logs[0], chosen_filter, metric)
    read = [records(log, chosen_filter, chosen_metric) for log in logs]
    paired = pairing.pair([arm for arm, _ in read])
    unit, length, warnings = pairing.lengths(
        paired.questions, names, _counter(tokenizer) if tokenizer else None, _name_of(tokenizer)
    )
    questions = [[question[i] for question in paired.questions] for i in range(len(logs))]
    arms = [
        _arm(name, role, own, known) for name, role, own, known in zip(names, roles, questions, length, strict=True)
    ]
    averaged = any(len(r.scores) != 1 or r.scores[0] not in (0.0, 1.0) for own in questions for r in own)
    tie = pairing.tie_breakers(paired.questions)
    compared = compare(arms, tie, bins, averaged)
    sources = [
        {
            "name": log.name,
            "role": role,
            "path": clean(str(log.path)),
            "files": {clean(str(path)): digest for path, digest in log.files.items()},
            "filters": {"unnamed" if name is None else name: count for name, count in log.filters.items()},
            "questions": len(arm),
            "repeated_rows": dropped,
            "cut_rows": log.cut,
            "overruled": sum(r.overruled for r in arm),
            "unpaired": unpaired,
            "no_score": unscored,
        }
        for log, role, (arm, dropped), unpaired, unscored in zip(
            logs, roles, read, paired.unpaired, paired.unscored, strict=True
        )
    ]
    result = {
        "schema": SCHEMA,
        "task": logs[0].task,
        "metric": chosen_metric,
        "filter": chosen_filter,
        "length_unit": unit,
        "questions": {"paired": len(paired.questions), "paired_on": paired.how},
        "arms": sources,
        **compared,
        "warnings": warnings + compared["warnings"],
        "notes": [note for log in logs for note in log.notes] + _notes(sources, paired.how),
    }
    return result, _table(arms, questions, assign_bins(arms[0].length, tie, len(compared["bins"])))


def _arms(paths: list[Path], controls: Sequence[str], names: Sequence[str]) -> tuple[list[Path], list[str], list[str]]:
    """(path, role, name) of every arm: the reference, the variants, the controls that are none of these."""
    given = [clean(name) for name in names]
    labels = given[: len(paths)] or _default_names(paths)
    roles = ["reference"] + [
        "control" if re.search(r"(?<![a-z0-9])control(?![a-z0-9])", n.lower()) else "scheme" for n in labels[1:]
    ]
    for control in controls:
        matches = [
            i for i in range(1, len(paths)) if i < len(labels) and (labels[i] == control or paths[i] == Path(control))
        ]
        if matches:
            roles[matches[0]] = "control"
        elif Path(control).exists():
            paths, roles = [*paths, Path(control)], [*roles, "control"]
        else:
            raise UsageError(
                f"--control {control}: neither the name of a variant ({', '.join(labels[1:]) or 'there is none'}) "
                "nor a file or folder"
            )
    resolved = [path.resolve() for path in paths]
    if same := [path for i, path in enumerate(paths) if resolved[i] in resolved[:i]]:
        raise UsageError(f"{same[0]} is given twice: a log compared with itself says nothing")
    if len(paths) < 2:
        raise UsageError("nothing to compare: pass at least one variant, or a --control, after the reference")
    if given and len(given) != len(paths):
        raise UsageError(
            f"--name is given {len(given)} times for {len(paths)} arms: "
            "name all, in order, the reference first, or none"
        )
    labels = given or _default_names(paths)
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise UsageError(f"two arms are called {twice[0]!r}: name all arms with --name")
    return paths, roles, labels


def _default_names(paths: Sequence[Path]) -> list[str]:
    """File stems or folder names, with as many parent folders as it takes to tell them apart."""
    parts = [(*p.absolute().parent.parts, p.stem if p.is_file() else p.absolute().name) for p in paths]
    for depth in range(1, max(map(len, parts)) + 1):
        labels = [clean("/".join(part[-depth:])) for part in parts]
        if len(set(labels)) == len(labels):
            break
    return labels


def _refuse_the_same_file(logs: Sequence[Log]) -> None:
    seen: dict[Path, str] = {}
    for log in logs:
        for file in log.files:
            if (other := seen.setdefault(file.resolve(), log.name)) != log.name:
                raise UsageError(f"{file}: read as {other} and as {log.name}: a log compared with itself says nothing")


def _name_of(tokenizer: str | None) -> str | None:
    """A hub id as it is; the last part of a folder, since a report is read on other machines."""
    return Path(tokenizer).name if tokenizer and Path(tokenizer).is_dir() else tokenizer


def _counter(tokenizer: str) -> Callable[[str], int]:
    """Counts tokens; the tokenizer is loaded at the first text."""
    loaded: list[Any] = []

    def count(text: str) -> int:
        if not loaded:
            from replayssm_tasks.hub import hub_reachable
            from transformers import AutoTokenizer

            # transformers warns of texts longer than the model's window.
            logging.getLogger("transformers").setLevel(logging.ERROR)
            local = Path(tokenizer).is_dir() or not hub_reachable()
            try:
                loaded.append(AutoTokenizer.from_pretrained(tokenizer, local_files_only=local))
            except Exception as error:  # damaged files raise whatever their parser raises
                reason = " ".join(str(error).split())[:200]
                raise UsageError(
                    f"--tokenizer {tokenizer} cannot be loaded: {reason}; pass a hub id or a local folder"
                ) from None
        return len(loaded[0](text, add_special_tokens=False)["input_ids"])

    return count


def _arm(name: str, role: str, questions: Sequence[Record], length: np.ndarray) -> Arm:
    def counts(values: Sequence[Sequence[bool | None]]) -> np.ndarray:
        """How many are true, NaN where one is not recorded."""
        return np.array([float(sum(map(bool, v))) if v and None not in v else np.nan for v in values])

    return Arm(
        name=name,
        role=role,
        score=np.array([r.score for r in questions]),
        length=length,
        answers=np.array([max(len(r.texts), len(r.scores)) for r in questions]),
        truncated=counts([r.truncated for r in questions]),
        not_extracted=counts([[not e for e in r.extracted] for r in questions]),
        looped=counts([r.looped for r in questions]),
    )


def _notes(sources: Sequence[dict[str, Any]], paired_on: str) -> list[str]:
    """What was left out, chosen or overruled while reading."""
    notes = []
    if paired_on != "doc_hash + prompt_hash":
        notes.append(
            f"Paired on {paired_on} alone: the logs lack hashes, "
            "so that a change of documents or prompts would not be seen."
        )
    for arm in sources:
        if len(arm["filters"]) > 1:
            notes.append(f"{arm['name']}: rows per filter: {', '.join(f'{n} {f}' for f, n in arm['filters'].items())}.")
        for key, what in (
            ("repeated_rows", "rows that repeat another one were dropped"),
            ("cut_rows", "cut last lines were left out"),
            ("overruled", "answers have a score although nothing was extracted; they count as not correct"),
        ):
            if arm[key]:
                notes.append(f"{arm['name']}: {arm[key]} {what}.")
        for key, what in (
            ("unpaired", "questions are not in all arms and left out"),
            ("no_score", "questions have no score and are left out"),
        ):
            if arm[key]:
                listing = ", ".join(arm[key][:10]) + (", ..." if len(arm[key]) > 10 else "")
                notes.append(f"{arm['name']}: {len(arm[key])} {what}: {listing}.")
    return notes


def _table(arms: Sequence[Arm], questions: Sequence[Sequence[Record]], which: np.ndarray) -> bytes:
    """quartiles.parquet: one row per question and arm."""
    import pyarrow
    import pyarrow.parquet

    def optional(values: np.ndarray) -> list[float | None]:
        return [float(v) if np.isfinite(v) else None for v in values]

    parts = []
    for arm, own in zip(arms, questions, strict=True):
        columns: dict[str, list[Any]] = {"arm": [arm.name] * len(own), "role": [arm.role] * len(own)}
        columns |= {key: [getattr(r, key) for r in own] for key in ("task", "doc_id", "doc_hash", "prompt_hash")}
        columns["bin"] = [int(b) if b >= 0 else None for b in which]
        columns["answers"] = arm.answers.tolist()
        columns |= {
            key: optional(getattr(arm, key)) for key in ("score", "length", "truncated", "not_extracted", "looped")
        }
        parts.append(pyarrow.table(columns, schema=_schema(pyarrow)))
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.concat_tables(parts), sink)
    return sink.getvalue()


def _schema(pyarrow: Any) -> Any:
    text = [(name, pyarrow.string()) for name in ("arm", "role", "task", "doc_id", "doc_hash", "prompt_hash")]
    whole = [(name, pyarrow.int32()) for name in ("bin", "answers")]
    return pyarrow.schema(
        text + whole + [(n, pyarrow.float64()) for n in ("score", "length", "truncated", "not_extracted", "looped")]
    )


def _write(folder: Path, result: dict[str, Any], table: bytes) -> None:
    """Make every file before writing any. quartiles.json comes last: where it is, everything is."""
    from .figure import quartile_figure
    from .report import quartiles_html, quartiles_markdown

    pictures = quartile_figure(result)
    files: dict[str, bytes | str] = {
        "quartiles.parquet": table,
        "quartiles.png": pictures["png"],
        "quartiles.svg": pictures["svg"],
        "quartiles.md": quartiles_markdown(result),
        "quartiles.html": quartiles_html(result, pictures["svg"].decode()),
    }
    for name, data in files.items():
        results.write_atomic(folder / name, data)
    results.write_json(folder / "quartiles.json", result)
