"""The tasks from Python: configurations, local data in place of the hub's, and loading with errors a user can act on.

    tasks = load_tasks([task_config("replayssm_gsm8k", data_path="gsm8k.jsonl", max_gen_toks=8192)])
    lm_eval.simple_evaluate(model=lm, tasks=tasks, task_manager=task_manager())

A configuration also works as it is (`simple_evaluate(tasks=[task_config(...)])`), and the names work with lm-eval's own
command line and `--include_path` TASKS_PATH.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from replayssm_emulation.errors import UsageError

from .documents import KINDS_OF_FILE, documents, local, read_rows

TASKS_PATH = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in TASKS_PATH.glob("replayssm_*.yaml")))
GENERATED = ("replayssm_progression",)


def full_name(name: str) -> str:
    """`gsm8k` or `replayssm_gsm8k` -> `replayssm_gsm8k`."""
    for candidate in (name, f"replayssm_{name}"):
        if candidate in NAMES:
            return candidate
    raise UsageError(f"unknown task {name!r}; known: {', '.join(NAMES)}")


def parse_task_data(items: Iterable[str]) -> dict[str, str]:
    """`NAME=PATH` items -> {full name: path}."""
    out = {}
    for item in items:
        name, equals, path = item.partition("=")
        if not equals or not path:
            raise UsageError(f"--task-data {item}: write NAME=PATH, for example gsm8k=gsm8k_test.jsonl")
        out[full_name(name)] = path
    return out


def task_config(
    name: str,
    data_path: str | Path | None = None,
    max_gen_toks: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A new lm-eval task configuration with its functions resolved.

    lm-eval changes what it is given, so make a new one for every run.

    data_path: a .jsonl, .json, .parquet or .csv file with the fields of the hub's data set, read and checked at once.
    metadata: replaces entries of the task's metadata, such as `progression_documents`, `progression_seed`.
    """
    from lm_eval.tasks._yaml_loader import load_yaml

    name = full_name(name)
    config: dict[str, Any] = load_yaml(TASKS_PATH / f"{name}.yaml")
    if data_path is not None:
        if name in GENERATED:
            raise UsageError(f"{name} is generated and takes no data; its settings are in its metadata")
        path = str(Path(data_path).expanduser())
        documents(name, read_rows(path), path)  # a bad file is an error now, not after the model has loaded
        for key in ("dataset_path", "dataset_name", "process_docs"):
            config.pop(key, None)
        config |= {
            "custom_dataset": local,
            "dataset_kwargs": {"local_path": path, "local_task": name},
            "test_split": "test",
        }
    if max_gen_toks is not None:
        if max_gen_toks < 1:
            raise UsageError(f"{name}: max_gen_toks must be positive, not {max_gen_toks}")
        config["generation_kwargs"]["max_gen_toks"] = max_gen_toks
    config["metadata"] |= metadata or {}
    return config


def load_tasks(configs: Iterable[Mapping[str, Any] | str], offline: bool = False) -> list[Any]:
    """lm-eval Task objects for `simple_evaluate(tasks=...)`, with their data.

    Raises UsageError for a data set that cannot be had.
    offline: look only into the local cache. Without a network the hub client would retry for 20 seconds.
    """
    from lm_eval.api.task import ConfigurableTask

    class HubTask(ConfigurableTask):
        def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
            try:
                super().download(dataset_kwargs, **kwargs)
            except Exception as error:  # the hub client raises many kinds, all meaning "not to be had"
                if isinstance(error, UsageError) or self.config.custom_dataset is not None:
                    raise
                raise hub_error(self.config.task, self.config.dataset_path, self.config.dataset_name, error) from None

    tasks = []
    for config in configs:
        config = task_config(config) if isinstance(config, str) else dict(config)
        with _hub_off() if offline else nullcontext():
            tasks.append(HubTask(config=config))
    return tasks


def hub_error(task: str, dataset: str, subset: str | None, error: Exception) -> UsageError:
    """One line on why a data set cannot be had and what to do instead."""
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    advice = f"pass --task-data {task}=PATH ({', '.join(KINDS_OF_FILE)})"
    if "gated" in reason or "authenticated" in reason:
        advice = f"accept its terms on the hub and set HF_TOKEN, or {advice}"
    return UsageError(f"{task}: data set {dataset}{f' ({subset})' if subset else ''} cannot be had: {reason}; {advice}")


def task_manager(include_defaults: bool = False, metadata: Mapping[str, Any] | None = None) -> Any:
    """A TaskManager that knows these tasks. It is ready at once, because it skips the 14,000 files of lm-eval."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(TASKS_PATH), include_defaults=include_defaults, metadata=dict(metadata or {}))


@contextmanager
def _hub_off() -> Iterator[None]:
    """Both clients read their offline flag when they need it; the environment variable is only read at import."""
    import datasets.config
    import huggingface_hub.constants

    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before
