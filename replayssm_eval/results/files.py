"""Result files: written whole or not at all, with where they came from."""

import datetime
import hashlib
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from decimal import Decimal
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from replayssm_emulation import UsageError

SCHEMA_KL = "replayssm-eval/kl@1"


def jsonable(value: Any) -> Any:
    """`value` for JSON: numpy scalars, arrays and decimals become numbers and lists, non-finite numbers None."""
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if isinstance(value, Decimal):
        return jsonable(float(value))
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_atomic(path: Path, data: bytes | str) -> None:
    """Write a file so that a kill at any moment leaves the old file or the new one: temporary file, fsync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: Any) -> str:
    """Write `value` as strict JSON (no NaN) and return the text."""
    text = json.dumps(jsonable(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomic(path, text)
    return text


def default_output(command: str, model: str) -> Path:
    """runs/<command>-<model>-<UTC time>/"""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path("runs") / f"{command}-{Path(model).name if Path(model).is_dir() else model.replace('/', '--')}-{stamp}"


def check_output(output: Path, overwrite: bool, resume: bool | None) -> None:
    """Refuse a folder that holds anything, unless told otherwise, or that cannot be written.

    resume: None for a command that cannot resume. Nothing is created or removed yet.
    The folder appears with the first result.
    """
    parent = next(p for p in (output, *output.absolute().parents) if p.exists())
    if not parent.is_dir():
        raise UsageError(f"--output {output}: {parent} is a file, not a folder")
    try:
        tempfile.TemporaryDirectory(dir=parent).cleanup()
    except OSError as error:
        raise UsageError(f"--output {output}: {parent} cannot be written to ({error.strerror})") from None
    if not output.exists():
        return
    if resume:
        if (output / "kl.json").exists() and not (output / "parts").exists():
            raise UsageError(f"{output} holds a finished run: there is nothing to resume")
        return
    if any(output.iterdir()) and not overwrite:
        advice = "--overwrite or" if resume is None else "--overwrite, --resume or"
        raise UsageError(f"{output} already holds a run: pass {advice} another --output")


def code_digest(*more: ModuleType) -> str:
    """SHA-256 of the sources that compute numbers, also those of `more` packages. Other code does not resume a run."""
    import replayssm_emulation
    import replayssm_kernels

    import replayssm_eval

    digest = hashlib.sha256()
    for package in (str(module.__file__) for module in (replayssm_eval, replayssm_emulation, replayssm_kernels, *more)):
        for path in sorted(p for p in Path(package).parent.rglob("*") if p.suffix in (".py", ".yaml")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _commit() -> str | None:
    """Commit of the source tree, marked when files differ from it; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def provenance(started: datetime.datetime) -> dict[str, Any]:
    """What is needed to repeat a run: command, versions, machine, time and peak memory."""
    import torch

    versions = {name: metadata.version(name) for name in ("torch", "transformers", "numpy", "tokenizers")}
    try:
        versions["replayssm-eval"] = metadata.version("replayssm-eval")
    except metadata.PackageNotFoundError:  # run from a source tree
        versions["replayssm-eval"] = "source"
    try:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    except ImportError:  # Windows
        peak = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    peaks = (
        [torch.cuda.max_memory_allocated(device) / 2**30 for device in range(torch.cuda.device_count())] if gpu else []
    )
    return {
        "command": shlex.join(
            ["replayssm-eval" if "replayssm" in sys.argv[0] else Path(sys.argv[0]).name, *sys.argv[1:]]
        ),
        "commit": _commit(),
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.datetime.now(datetime.UTC) - started).total_seconds(), 1),
        "peak_memory_gib": None if peak is None else round(peak, 2),
        "peak_gpu_memory_gib": round(max(peaks), 2) if gpu else None,
        **({"peak_gpu_memory_by_device_gib": [round(peak, 2) for peak in peaks]} if sum(map(bool, peaks)) > 1 else {}),
    }
