import os
import shutil
import subprocess

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: kernels then run on the CPU


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, help="runs that test_crash.py kills in each way; `make test-crash`")


@pytest.fixture
def small_disk(tmp_path):
    """A real file system of one megabyte."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a tmpfs needs root; the same case runs above with a write that fails")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)
