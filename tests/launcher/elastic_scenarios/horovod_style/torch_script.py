"""Elastic training with PyTorch, written for Horovod."""

import os
import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from torch import optim

EPOCHS, BATCHES, BATCHES_PER_COMMIT, LR = 8, 10, 2, 0.01

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1 + int(os.environ["HOROVOD_RANK"]))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
optimizer = optim.SGD(model.parameters(), lr=LR * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run
def train(state):
    print(f"size {hvd.size()} rank {hvd.rank()} pid {os.getpid()}", flush=True)
    for state.epoch in range(state.epoch, EPOCHS):
        for state.batch in range(state.batch, BATCHES):
            data, target = torch.randn(4, 4), torch.randint(0, 2, (4,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), target)
            loss.backward()
            optimizer.step()
            state.steps += 1
            time.sleep(0.03)
            if state.batch % BATCHES_PER_COMMIT == 0:
                state.commit()
        state.batch = 0


def on_state_reset():
    for group in optimizer.param_groups:
        group["lr"] = LR * hvd.size()


state = hvd.elastic.TorchState(model, optimizer, batch=0, epoch=0, steps=0)
state.register_reset_callbacks([on_state_reset])
train(state)
weights = [value.tolist() for value in model.state_dict().values()]
lr = optimizer.param_groups[0]["lr"]
print("result", state.epoch, state.batch, state.steps, lr / hvd.size() / LR, weights, flush=True)
