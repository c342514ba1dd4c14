"""Where there is no GPU, Triton kernels run in the interpreter. Must be decided before triton is imported."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def main(monkeypatch, capsys):
    """The command in this process: quicker, and patches reach it."""
    from replayssm_eval import cli

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["replayssm-eval", *map(str, args)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out = capsys.readouterr()
        return caught.value.code, out.out, out.err

    return call
