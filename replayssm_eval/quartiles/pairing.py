"""The same questions in several arms, and the lengths of their answers."""

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from replayssm_emulation import UsageError

from .records import Record


@dataclass(frozen=True)
class Pairing:
    """questions: one record per arm, in the reference's order; every arm has a score. how: what they are paired on.

    unpaired, unscored: labels of the questions of each arm that some arm lacks, or that it has no score for.
    """

    how: str
    questions: list[tuple[Record, ...]]
    unpaired: list[list[str]]
    unscored: list[list[str]]


def pair(arms: Sequence[Sequence[Record]]) -> Pairing:
    """Questions that all arms have, paired on doc_hash and prompt_hash, or on doc_id where hashes are missing.

    arms: the reference first. Raises UsageError where two arms gave one document another prompt, target or content:
    their answers cannot be compared.
    """
    everything = [record for arm in arms for record in arm]
    if all(r.doc_hash is not None for r in everything):
        keys = ("doc_hash", "prompt_hash") if all(r.prompt_hash is not None for r in everything) else ("doc_hash",)
    else:
        nameless = next((r for r in everything if r.doc_id is None), None)
        if nameless:
            raise UsageError(f"{nameless.source}: no doc_id, and other rows have no doc_hash: nothing to pair on")
        keys = ("task", "doc_id")
    indexed = [_indexed(arm, keys) for arm in arms]
    for other in indexed[1:]:
        _refuse_mismatch(indexed[0], other)
    common = [key for key in indexed[0] if all(key in other for other in indexed[1:])]
    if not common:
        raise UsageError(
            f"no document is in all arms ({', '.join(f'{a[0].file}: {len(a)}' for a in arms)}; "
            f"paired on {' + '.join(keys)})"
        )
    questions = [tuple(index[key] for index in indexed) for key in common]
    scored = [q for q in questions if not any(math.isnan(r.score) for r in q)]
    if not scored:
        raise UsageError(f"no document has a score in all arms ({', '.join(str(a[0].file) for a in arms)})")
    unpaired = [
        [r.label for key, r in index.items() if any(key not in other for other in indexed)] for index in indexed
    ]
    unscored = [[q[i].label for q in questions if math.isnan(q[i].score)] for i in range(len(arms))]
    return Pairing(" + ".join(keys), scored, unpaired, unscored)


def _indexed(arm: Sequence[Record], keys: tuple[str, ...]) -> dict[tuple, Record]:
    """Records by key, in order of (task, doc_id). A document that a data set holds twice is told apart by its rank."""
    seen: Counter[tuple] = Counter()
    out = {}
    for record in sorted(arm, key=_natural):
        key = tuple(getattr(record, name) for name in keys)
        out[(*key, seen[key])] = record
        seen[key] += 1
    return out


def _natural(record: Record) -> tuple:
    """Order of documents: 2 before 10."""
    name = record.doc_id or ""
    return (
        record.task,
        (0, int(name), "") if name.isascii() and name.isdecimal() else (1, 0, name),
        record.doc_hash or "",
    )


def _refuse_mismatch(reference: dict[tuple, Record], other: dict[tuple, Record]) -> None:
    """Raises UsageError for the first document that is in both arms but is not the same question."""
    twins = [(r, other[key]) for key, r in reference.items() if key in other]
    # Not paired, but the same document or the same place in the data set: the pairing must not hide that.
    left = [r for key, r in reference.items() if key not in other]
    right = [r for key, r in other.items() if key not in reference]
    for same in (lambda r: r.doc_hash, lambda r: None if r.doc_id is None else (r.task, r.doc_id)):
        by_key = {same(r): r for r in reversed(right) if same(r) is not None}
        twins += [(r, by_key[same(r)]) for r in left if same(r) in by_key]
    for a, b in twins:
        for what in ("doc_hash", "prompt_hash", "target_hash"):
            mine, theirs = getattr(a, what), getattr(b, what)
            if mine is not None and theirs is not None and mine != theirs:
                reason = {
                    "doc_hash": "is another document",
                    "prompt_hash": "has another prompt",
                    "target_hash": "has another target",
                }[what]
                raise UsageError(
                    f"document {a.label} ({b.source}) {reason} than in {a.source}: "
                    f"{what} {theirs[:12]}, not {mine[:12]}; "
                    "compare runs of one task version, prompt template and few-shot seed"
                )


def tie_breakers(questions: Sequence[tuple[Record, ...]]) -> list[str]:
    """What orders questions of equal length: the reference's doc_hash, or a hash of its name where there is none."""
    return [q[0].doc_hash or hashlib.sha256(q[0].label.encode()).hexdigest() for q in questions]


def lengths(
    questions: Sequence[tuple[Record, ...]],
    names: Sequence[str],
    count: Callable[[str], int] | None,
    tokenizer: str | None,
) -> tuple[str, np.ndarray, list[str]]:
    """(unit, `[arms, questions]` median length over a question's answers, warnings); NaN where it is not known.

    Recorded tokens count; where the reference has none, the tokens that `count` (of the tokenizer so called) finds in
    the texts of all arms; without it, characters. An arm alone in lacking records is counted by `count`, or not at all.
    """
    recorded = [any(t is not None for q in questions for t in q[arm].tokens) for arm in range(len(names))]
    characters = not recorded[0] and count is None
    unit = "tokens" if recorded[0] else "characters" if characters else f"tokens of {tokenizer}"
    warnings = []
    if not recorded[0]:
        warnings.append(
            f"Lengths are {unit} of the logged text: no token counts are recorded in {names[0]}. "
            "lm-eval strips the thinking part before it logs"
            + ("; pass --tokenizer to count tokens." if characters else ".")
        )
    out = np.full((len(names), len(questions)), np.nan)
    for arm, name in enumerate(names):
        use_records = recorded[0] and recorded[arm]
        if recorded[0] and not recorded[arm]:
            how = (
                f"are counted by {tokenizer} in the logged text"
                if count
                else "are not known: pass --tokenizer to count them in the text"
            )
            warnings.append(f"{name} records no token counts; its lengths {how}.")
        measure = len if characters else count
        for i, question in enumerate(questions):
            record = question[arm]
            if use_records:
                known = [t for t in record.tokens if t is not None]
            else:
                known = [float(measure(t)) for t in record.texts if t is not None] if measure else []
            if known:
                out[arm, i] = statistics.median(known)
    return unit, out, warnings
