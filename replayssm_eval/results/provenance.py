"""Where a result came from: the command, the versions, the machine and the code that computed it."""

import ast
import datetime
import hashlib
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

#: Rooms of replayssm_eval whose code changes a number of a run that can be resumed.
COMPUTING_ROOMS = ("models", "inference", "kl", "accuracy")
# These files of a room only show numbers, or name and check options. The values of the options are compared themselves.
_NO_NUMBERS = ("report.py", "figure.py", "options.py")


@dataclass(frozen=True)
class Provenance:
    """What is needed to repeat a run.

    seconds: wall time since `started`. peak_memory_gib: of this process; None on Windows.
    peak_gpu_memory_gib: of the fullest GPU. peak_gpu_memory_by_device_gib: one number per GPU; None unless two or more
    were used.
    """

    command: str
    commit: str | None
    versions: dict[str, str]
    python: str
    platform: str
    gpu: str | None
    threads: int
    started: str
    seconds: float
    peak_memory_gib: float | None
    peak_gpu_memory_gib: float | None
    peak_gpu_memory_by_device_gib: list[float] | None = None

    def as_json(self) -> dict[str, Any]:
        """The entry "provenance" of a result file."""
        entry = asdict(self)
        if self.peak_gpu_memory_by_device_gib is None:
            del entry["peak_gpu_memory_by_device_gib"]
        return entry


def collect_provenance(started: datetime.datetime) -> Provenance:
    """The provenance of a run that began at `started` and ends now."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    devices = range(torch.cuda.device_count()) if gpu else ()
    peaks = [torch.cuda.max_memory_allocated(device) / 2**30 for device in devices]
    peak = _peak_memory()
    program = "replayssm-eval" if "replayssm" in sys.argv[0] else Path(sys.argv[0]).name
    return Provenance(
        command=shlex.join([program, *sys.argv[1:]]),
        commit=_commit(),
        versions=_versions(),
        python=platform.python_version(),
        platform=platform.platform(),
        gpu=gpu,
        threads=torch.get_num_threads(),
        started=started.isoformat(timespec="seconds"),
        seconds=round((datetime.datetime.now(datetime.UTC) - started).total_seconds(), 1),
        peak_memory_gib=None if peak is None else round(peak, 2),
        peak_gpu_memory_gib=round(max(peaks), 2) if peaks else None,
        peak_gpu_memory_by_device_gib=[round(p, 2) for p in peaks] if sum(map(bool, peaks)) > 1 else None,
    )


def provenance(started: datetime.datetime) -> dict[str, Any]:
    """`collect_provenance` as JSON."""
    return collect_provenance(started).as_json()


def code_digests(*modules: ModuleType, rooms: Sequence[str] = COMPUTING_ROOMS) -> dict[str, str]:
    """SHA-256 by room of the code that computes numbers: a run must not be resumed by other code.

    The rooms are the packages replayssm_emulation and replayssm_kernels ("emulation", "kernels"), then folders of
    replayssm_eval (`rooms`), then further packages (`modules`), by their name without "replayssm_".
    Comments, docstrings and layout change no digest. Files that only show numbers are left out.
    """
    import replayssm_emulation
    import replayssm_kernels

    import replayssm_eval

    folders = {_short_name(package): _folder(package) for package in (replayssm_emulation, replayssm_kernels)}
    folders |= {room: _folder(replayssm_eval) / room for room in rooms}
    folders |= {_short_name(package): _folder(package) for package in modules}
    return {room: folder_digest(folder) for room, folder in folders.items()}


def code_digest(*modules: ModuleType) -> str:
    """`code_digests` of all computing rooms and of `modules` as one SHA-256."""
    return hashlib.sha256(repr(code_digests(*modules)).encode()).hexdigest()


def folder_digest(folder: Path) -> str:
    """SHA-256 over the Python and YAML files in `folder`, at any depth, with their paths.

    Raises FileNotFoundError when there is none.
    """
    files = [path for path in _sources(folder) if path.name not in _NO_NUMBERS]
    if not files:
        raise FileNotFoundError(f"{folder} holds no source file")
    digest = hashlib.sha256()
    for path in files:
        source = path.read_bytes()
        # What Python runs: comments and layout are gone after parsing.
        code = _without_docstrings(source).encode() if path.suffix == ".py" else source
        digest.update(f"{path.relative_to(folder).as_posix()} {len(code)}\n".encode() + code)
    return digest.hexdigest()


def _sources(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".yaml"))


@cache  # parsing all rooms takes a second
def _without_docstrings(source: bytes) -> str:
    """The syntax tree of Python source as text, without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match node.body:
                case [ast.Expr(value=ast.Constant(value=str())), *rest]:
                    node.body = rest
    return ast.dump(tree)


def _folder(package: ModuleType) -> Path:
    return Path(str(package.__file__)).parent


def _short_name(package: ModuleType) -> str:
    return package.__name__.removeprefix("replayssm_")


def _versions() -> dict[str, str]:
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "numpy", "tokenizers")}
    try:
        versions["replayssm-eval"] = metadata.version("replayssm-eval")
    except metadata.PackageNotFoundError:  # run from a source tree
        versions["replayssm-eval"] = "source"
    return versions


def _peak_memory() -> float | None:
    """GiB of memory that this process held at its peak; None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _commit() -> str | None:
    """Commit of the source tree, marked when files differ from it; None for an installed package."""
    import replayssm_eval

    root = _folder(replayssm_eval).resolve().parent
    if not (root / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
