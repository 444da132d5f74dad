"""What torchtitan 0.3.0 asks of a machine with GPUs and of a newer torch, for a CPU with gloo and torch 2.13."""

import inspect
import sys
import types

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules
from torchtitan.tools import utils


def nothing(*_, **__):
    return None


DEVICE = types.SimpleNamespace(
    set_device=nothing,
    current_device=lambda: 0,
    synchronize=nothing,
    device_count=lambda: 1,
    get_device_name=lambda _=None: "cpu",
    get_device_properties=lambda _=None: types.SimpleNamespace(total_memory=2**34),
    reset_peak_memory_stats=nothing,
    empty_cache=nothing,
    memory_stats=lambda _=None: {},
    is_available=lambda: True,
    manual_seed=torch.manual_seed,
)


def use_cpu() -> None:
    utils.device_type, utils.device_module = "cpu", DEVICE
    for name, module in list(sys.modules.items()):
        if not name.startswith("torchtitan"):
            continue
        if hasattr(module, "device_type"):
            module.device_type = "cpu"
        if hasattr(module, "device_module"):
            module.device_module = DEVICE
    # gloo takes no device, and has no timeouts to set
    barrier = dist.barrier
    dist.barrier = lambda *_, **__: barrier()
    dist.set_timeout = nothing
    sum_gradients_plainly()
    for schedule in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        if "arg_mbs" not in inspect.signature(schedule.step).parameters:
            take_micro_batches(schedule)


def sum_gradients_plainly() -> None:
    """gloo has no sum with a factor, which FSDP2 asks for where a factor is set."""
    set_factor = FSDPModule.set_gradient_divide_factor

    def with_plain_sums(self, factor):
        set_factor(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = with_plain_sums


def take_micro_batches(schedule) -> None:
    """torchtitan hands over a list of micro-batches, and torch 2.13 splits a batch by itself."""
    step_of_batch = schedule.step

    def step(self, *args, arg_mbs=None, kwarg_mbs=None, target_mbs=None, target=None, **options):
        if kwarg_mbs is None:
            return step_of_batch(self, *args, target=target, **options)
        count = len(kwarg_mbs)
        self._split_inputs = lambda _, __: (arg_mbs or [()] * count, kwarg_mbs)
        if target_mbs is not None:
            target = torch.cat(target_mbs)
        return step_of_batch(self, target=target, **options)

    schedule.step = step
