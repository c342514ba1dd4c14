"""lm-eval task files for thinking models, with their extraction and grading, and a generated task for testbeds.

gpqa_diamond, mmlu_pro, math_level5, gsm8k    zero-shot, long answers allowed, data from the hub or a local file
progression                                   generated; see `progression`
"""

from .extract import INVALID, answer_text, extract, reopen_thinking
from .tasks import NAMES, TASKS_PATH, hub_error, load_tasks, parse_task_data, task_config, task_manager

__all__ = [
    "INVALID",
    "NAMES",
    "TASKS_PATH",
    "answer_text",
    "extract",
    "hub_error",
    "load_tasks",
    "parse_task_data",
    "reopen_thinking",
    "task_config",
    "task_manager",
]
