"""A program of the tests with Lightning, which starts rank 1 itself and trains until the file named in its arguments
is there.
"""

import os
import sys
import time
import warnings

import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.layer(batch).pow(2).mean()
        losses.append(float(loss.detach()))
        time.sleep(0.02)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class EndsWithFile(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ends = os.path.exists(sys.argv[1])
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(ends, all=False)


warnings.simplefilter("ignore")
pl.seed_everything(0, verbose=False)
losses = []
model = Model()
trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=-1,
    callbacks=[EndsWithFile()],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(torch.rand(64, 4), batch_size=4))
print(f"rank {trainer.global_rank} ends after {len(losses)} steps", flush=True)
