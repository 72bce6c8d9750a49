"""A program of the tests with Accelerate, which trains until the file named in its arguments is there."""

import os
import sys
import time

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
model, optimizer, batches = accelerator.prepare(model, optimizer, DataLoader(torch.rand(64, 4), batch_size=4))
losses = []
ends = False
while not ends:
    for batch in batches:
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
        time.sleep(0.02)
    ends = bool(accelerator.reduce(torch.tensor(float(os.path.exists(sys.argv[1])))))
print(f"rank {accelerator.process_index} ends after {len(losses)} steps", flush=True)
accelerator.end_training()
