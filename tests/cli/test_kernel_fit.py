"""Kernels and fits through the commands: what the machine lacks, what a release refuses, what cannot apply."""

from __future__ import annotations

import pytest
import torch

from tests.cli.conftest import PortFolder
from tests.cli.test_commands import call


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message for a machine without a GPU")
def test_the_real_kernel_without_a_gpu_is_exit_3(port: PortFolder, tmp_path):
    code, document, stderr = call("align", port.file, "--out", tmp_path / "run", "-p", "kernel=xqa")
    assert code == 3
    text = str(document) + stderr
    assert "needs a GPU" in text
    assert "release:<x>" in text
    # Said before anything is loaded or written.
    assert not (tmp_path / "run" / "checkpoint").exists()
