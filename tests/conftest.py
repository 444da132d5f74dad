import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: kernels then run on the CPU


def pytest_addoption(parser):
    parser.addoption("--kills", type=int, help="runs that tests/test_crash.py kills in each way; `make test-crash`")
