"""Which residual learns this text best? Several of them, two seeds each, on equal tokens; then a page to look at.

python examples/compare_residuals.py [TEXT]          # a file or a folder; by default Python's standard library
"""

import sys

from headwater.analyze import write_report
from headwater.train import (
    Config,
    DataSettings,
    ModelConfig,
    OptimSettings,
    TrainSettings,
    compare,
)

if __name__ == "__main__":
    config = Config(
        model=ModelConfig.named("nano"),
        data=DataSettings(source=tuple(sys.argv[1:2]) or ("stdlib",)),
        optim=OptimSettings(lr=6e-3),
        train=TrainSettings(steps=60, batch_size=4, eval_every=20, eval_windows=16),
    )
    residuals = ["standard", "attnres-block:block=2", "denseformer"]
    table = compare(config, "runs/compared", residuals=residuals, seeds=[0, 1], jobs=2)
    for row in table.rows:
        print(f"{row.residual}: {row.bits_per_byte.mean:.4f} bits per byte, {row.verdict}")
    print(write_report([table.folder], None))
