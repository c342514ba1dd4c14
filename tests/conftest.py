"""What must be decided before torch and triton are imported; fixtures for all tests."""

import os
import sys

# Workers share the processors. A waiting thread must not spin: 8 spinning threads on 2 cores take minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if workers := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

import pytest
import torch

# Where there is no GPU, Triton kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def main(monkeypatch, capsys):
    """The command in this process: quicker, and patches reach it."""
    from replayssm_eval.cli import main as cli

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["replayssm-eval", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out = capsys.readouterr()
        return caught.value.code, out.out, out.err

    return call
