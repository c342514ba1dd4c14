"""Ask the same questions once in every arm, by lm-eval: a reference, a control and one arm per scheme.

Every arm keeps its own folder and samples_TASK.jsonl. A line holds lm-eval's row and, of each answer, the raw text, the
count of generated tokens (thinking included), the stop reason and whether it ended in a loop. A score that is no number
is null, and `status` names it. `quartiles` compares the arms.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from replayssm_emulation import Scheme, UsageError, parse_scheme
from replayssm_emulation.errors import require

from ..models.loading import Loaded, load, location_of, weights_digest
from ..results.files import check_output, jsonable, write_atomic
from ..results.provenance import code_digest
from .options import AccuracyOptions

REFERENCE, CONTROL = "reference", "control"


@dataclass(frozen=True)
class Arm:
    """name: of its folder, and of the arm in tables."""

    name: str
    scheme: Scheme
    batch_size: int

    @property
    def folder(self) -> str:
        return self.name.replace("/", "--")


def planned_arms(options: AccuracyOptions) -> list[Arm]:
    """Reference, control, schemes."""
    fp32, batch = parse_scheme("fp32"), options.batch_size
    return [
        Arm(REFERENCE, fp32, batch),
        Arm(CONTROL, fp32, max(1, batch // 2)),
        *(Arm(str(s), s, batch) for s in options.parsed()),
    ]


def run_accuracy(
    options: AccuracyOptions,
    output: Path,
    *,
    overwrite: bool = False,
    resume: bool = False,
    loaded: Loaded | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Path]:
    """Answer every task in every arm; returns the arms' folders by name, the reference first.

    A kill loses at most one block of documents; resume goes on with the next, and refuses an arm of other options.
    Raises UsageError for bad options, before the model is loaded where that can be told.
    """
    arms = planned_arms(options)
    check_output(output, overwrite, resume)
    require("lm_eval", "accuracy", "accuracy")
    tasks = _tasks(options)
    _check_lengths(options, tasks)
    loaded = loaded or load(options)
    for arm in arms:
        _answer(arm, options, tasks, output / arm.folder, loaded, overwrite and not resume, say)
    return {arm.name: output / arm.folder for arm in arms}


def _tasks(options: AccuracyOptions) -> dict[str, Any]:
    """lm-eval task objects by name, with documents. Data that cannot be had is refused before the model is loaded."""
    from replayssm_tasks import NAMES, load_tasks, task_config
    from replayssm_tasks.hub import hub_reachable

    configs: list[dict[str, Any] | str] = []
    others = []
    for name in options.tasks:
        full = name if name in NAMES else f"replayssm_{name}"
        if full not in NAMES:
            others.append(name)
            continue
        configs.append(task_config(full, options.task_data.get(full), options.max_gen_toks, options.metadata))
    tasks = {task.config.task: task for task in load_tasks(configs, offline=not hub_reachable())}
    if others:
        if options.task_data:
            unknown = set(options.task_data) - set(tasks)
            if unknown:
                raise UsageError(
                    f"--task-data {sorted(unknown)[0]}: only tasks of this package take a local file; "
                    "use --include-path"
                )
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=options.include_path)
        for name in others:
            try:
                found = manager.load(name)
            except KeyError:
                raise UsageError(
                    f"unknown task {name!r}: neither of this package ({', '.join(NAMES)}) nor of lm-eval"
                ) from None
            tasks |= _flat(found)
    return tasks


def _flat(found: Any) -> dict[str, Any]:
    """Tasks of lm-eval's nested groups, by name."""
    tasks: dict[str, Any] = {}
    for name, value in (found.get("tasks", found) if isinstance(found, dict) else {}).items():
        tasks |= _flat(value) if isinstance(value, dict) else {str(getattr(value.config, "task", name)): value}
    return tasks


def _check_lengths(options: AccuracyOptions, tasks: Mapping[str, Any]) -> None:
    """Raises UsageError when an answer of the asked length leaves no room for its prompt."""
    from transformers import AutoConfig

    room = options.max_length
    if room is None:
        try:
            config = AutoConfig.from_pretrained(location_of(options.model), local_files_only=True)
            room = getattr(config.get_text_config(), "max_position_embeddings", None)
        except (OSError, ValueError):
            return  # not here yet: lm-eval checks again when it is loaded
    for name, task in tasks.items():
        longest = (task.config.generation_kwargs or {}).get("max_gen_toks")
        if room is not None and longest is not None and longest >= room:
            raise UsageError(
                f"{name}: answers of up to {longest} tokens (max_gen_toks) leave no room for a prompt within {room}; "
                "pass a smaller --max-gen-toks, or --max-length"
            )


def _answer(
    arm: Arm,
    options: AccuracyOptions,
    tasks: Mapping[str, Any],
    folder: Path,
    loaded: Loaded,
    anew: bool,
    say: Callable[[str], None],
) -> None:
    """All documents of an arm that its files do not hold yet, block by block."""
    import replayssm_tasks

    from .backend import ReplayLM

    own = {"schemes": str(arm.scheme), "arm": arm.name, "batch_size": arm.batch_size}
    # A name can come to stand for other weights or other documents.
    meant = {
        "code": code_digest(replayssm_tasks),
        "weights": weights_digest(loaded.model),
        "documents": {name: _documents_digest(task) for name, task in tasks.items()},
    }
    settings = jsonable({**options.to_json(), **own, **meant})
    settings.pop("limit")  # more documents of the same run are no other run
    kept = folder / "arm.json"
    if anew:
        for path in (*folder.glob("samples_*.jsonl"), kept):
            path.unlink(missing_ok=True)
    if kept.exists() and json.loads(kept.read_text(encoding="utf-8")) != json.loads(json.dumps(settings)):
        raise UsageError(
            f"{folder} holds answers of other options, weights, documents or code: pass --overwrite or another --output"
        )
    write_atomic(kept, json.dumps(settings, indent=1) + "\n")
    rows = {name: _rows(folder / f"samples_{name}.jsonl") for name in tasks}
    todo = {
        name: [
            i
            for i in range(min(options.limit or len(task.eval_docs), len(task.eval_docs)))
            if i not in {r["doc_id"] for r in rows[name]}
        ]
        for name, task in tasks.items()
    }
    if not any(todo.values()):
        say(f"{arm.name}: all answers are there")
        return
    lm = ReplayLM(
        options.model,
        scheme=str(arm.scheme),
        noise_seed=options.seed,
        backend_scan=options.backend,
        loaded=loaded,
        batch_size=arm.batch_size,
        max_length=options.max_length,
        think_end_token=options.think_end_token,
    )
    try:
        for name, indices in todo.items():
            for start in range(0, len(indices), options.batch_size):
                block = indices[start : start + options.batch_size]
                rows[name] += _evaluate(lm, tasks[name], name, block, options)
                rows[name].sort(key=lambda row: (row["doc_id"], str(row["filter"])))
                write_atomic(
                    folder / f"samples_{name}.jsonl",
                    "".join(json.dumps(jsonable(row), default=str) + "\n" for row in rows[name]),
                )
                say(f"{arm.name}: {name} {start + len(block)}/{len(indices)}")
    finally:
        lm.close()


def _documents_digest(task: Any) -> str:
    return hashlib.sha256(json.dumps(list(task.eval_docs), default=str).encode()).hexdigest()


def _rows(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _evaluate(lm: Any, task: Any, name: str, indices: list[int], options: AccuracyOptions) -> list[dict[str, Any]]:
    """lm-eval's sample rows of some documents, with what is known of the generations."""
    import lm_eval
    import lm_eval.evaluator
    from replayssm_tasks import reopen_thinking, task_manager
    from replayssm_tasks.loops import loops

    lm.generations.clear()
    # Its commit is that of the folder one happens to be in, and git complains where that is no checkout.
    with patch.object(lm_eval.evaluator, "get_git_commit_hash", return_value=None):
        result = lm_eval.simple_evaluate(
            model=lm,
            tasks=[task],
            samples={name: indices},
            gen_kwargs=options.gen_kwargs,
            apply_chat_template=options.apply_chat_template,
            num_fewshot=options.num_fewshot,
            # The default one of lm-eval lists all of its tasks, which takes eight seconds.
            task_manager=task_manager(),
            log_samples=True,
            bootstrap_iters=0,
            verbosity="ERROR",
        )
    assert result is not None
    rows = []
    for row in result["samples"][name]:
        made = lm.generation_for(row["arguments"][0][0]) if task.OUTPUT_TYPE == "generate_until" else None
        if made is not None:
            text = reopen_thinking(row["arguments"][0][0], lm.tok_decode(list(made.ids), skip_special_tokens=False))
            row |= {"tokens": made.tokens, "stop": made.stop, "raw": text, "looped": loops(text)}
        if missing := [name for name in row["metrics"] if jsonable(row.get(name)) is None]:
            row["status"] = f"no score: {', '.join(missing)}"
        rows.append(row)
    return rows
