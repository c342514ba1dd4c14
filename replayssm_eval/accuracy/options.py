"""Options of the command `accuracy`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replayssm_emulation import Scheme, UsageError, parse_scheme

from ..inference.options import ScanOptions, schemes_option
from ..models.options import CheckpointOptions, model_option
from ..results.options import option

DEFAULT_SCHEMES = ("nvfp4@16", "nvfp4/fp16@16")
# A model in the package, the task that it was trained to answer, and how many documents take minutes on a CPU.
TESTBED, TESTBED_TASKS, TESTBED_LIMIT = "tiny-answers", ("progression",), 64
DEFAULT_TASKS = ("gsm8k",)


def _task_data(items: list[str]) -> dict[str, str]:
    from replayssm_tasks import parse_task_data

    return parse_task_data(items)


@dataclass(frozen=True)
class AccuracyOptions(ScanOptions, CheckpointOptions):
    """Everything that decides the answers.

    tasks: names of `replayssm_tasks`, of lm-eval, or of task files in the folder `include_path`.
    limit: documents of each task, None for all. batch_size: sequences that are generated together. The control uses
    half of it, because another batch is the smallest change that a run can have.
    task_data: local file by task name. gen_kwargs: text in lm-eval's form. metadata: replaces entries of a task's
    metadata, such as `progression_lengths`.
    """

    LAST = ("dtype", "device", "revision", "trust_remote_code", "backend")

    model: str = model_option(TESTBED)
    schemes: Sequence[str | Scheme] = schemes_option(
        DEFAULT_SCHEMES, f"How the state is stored; repeatable. Default: {', '.join(DEFAULT_SCHEMES)}."
    )
    tasks: Sequence[str] = option(
        TESTBED_TASKS,
        "Task of this package (gsm8k, math_level5, ...) or of lm-eval; repeatable. "
        "Default: progression for tiny-answers, which was trained on it, else gsm8k.",
        "--task",
        "--tasks",
        item=str,
    )
    limit: int | None = option(
        TESTBED_LIMIT,
        "Documents of each task. Default: all, but 64 for tiny-answers with its own task.",
        default_depends=True,
    )
    batch_size: int = option(64, "Sequences that are generated together. The control uses half of it.")
    seed: int = option(0, "Seed of the rounding noise.")
    task_data: Mapping[str, str] = option(
        None,
        "Local file that replaces the data set of a task; repeatable.",
        factory=dict,
        metavar="NAME=PATH",
        item=str,
        parse=_task_data,
    )
    max_gen_toks: int | None = option(None, "Longest answer in tokens. Default: the task's own limit.")
    max_length: int | None = option(
        None, "Longest prompt and answer together, in tokens. Default: the model's own limit."
    )
    gen_kwargs: str | None = option(None, "Generation settings in lm-eval's form, e.g. temperature=0.6,do_sample=true.")
    apply_chat_template: bool = option(False, "Send prompts as chat messages.")
    num_fewshot: int | None = option(None, "Examples in the prompt. Default: the task's own number.")
    include_path: str | None = option(None, "Folder with your own lm-eval task files.")
    think_end_token: str | None = option(None, "Mark that ends the thinking part, as text or token id.")
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def with_defaults_of_model(cls, **given: Any) -> "AccuracyOptions":
        """Options with `given` set. Only the testbed has its own task and limit as defaults."""
        if given.get("model", TESTBED) != TESTBED or "tasks" in given:
            given = {"tasks": DEFAULT_TASKS, "limit": None, **given}
        return cls(**given)

    def parsed(self) -> list[Scheme]:
        """The schemes, each once. Raises UsageError for a bad option."""
        for name in ("batch_size", "limit", "max_gen_toks", "max_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} {value}: must be at least 1")
        self.check_model()
        schemes = [parse_scheme(s) if isinstance(s, str) else s for s in self.schemes]
        if not schemes or not self.tasks:
            raise UsageError("nothing to do: pass at least one --scheme and one --task")
        if repeated := [str(s) for s in dict.fromkeys(schemes) if schemes.count(s) > 1]:
            raise UsageError(f"scheme {repeated[0]} is given twice")
        return schemes
