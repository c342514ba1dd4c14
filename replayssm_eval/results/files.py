"""Result files and their folders. A file is written whole or not at all."""

import datetime
import json
import math
import os
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

from replayssm_emulation import UsageError


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
