import os
import shutil
import subprocess

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: kernels then run on the CPU


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, help="runs that test_crash.py kills in each way; `make test-crash`")
    parser.addoption("--share", help="2/8: the third of eight shares of the chosen tests; `make test-gpu`")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config, items):
    if config.getoption("--share"):
        mine, shares = map(int, config.getoption("--share").split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % shares != mine])
        items[:] = items[mine::shares]


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
