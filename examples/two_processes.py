"""One run on two processes, its parameters divided among them (FSDP2); the same weights as on one.

    torchrun --nproc-per-node 2 examples/two_processes.py [TEXT]     # or 8 GPUs, or several machines
    python examples/two_processes.py [TEXT]                          # the same run on one process

`headwater train` does the same under torchrun; `--pipeline` and `--tensor` divide depth and width.
"""

import os
import sys

from headwater.train import (
    Config,
    DataSettings,
    ModelConfig,
    ParallelSettings,
    TrainSettings,
    train,
)

if __name__ == "__main__":
    config = Config(
        model=ModelConfig.named("nano", residual="attnres-block"),
        data=DataSettings(source=tuple(sys.argv[1:2]) or ("stdlib",)),
        train=TrainSettings(steps=10, batch_size=8, eval_windows=8),
        # 0: every rank holds a part of each parameter; 1: every rank its own copy
        parallel=ParallelSettings(shard=0),
    )
    result = train(config, f"runs/on-{os.environ.get('WORLD_SIZE', '1')}")
    if os.environ.get("RANK", "0") == "0":
        print(f"{result.bits_per_byte:.4f} bits per byte, {result.folder}")
