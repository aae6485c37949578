"""A std for a PyTorch network that predicts means alone, and intervals that hold."""

import jax
import numpy as np
import torch

import jaxcal as jc

rng = np.random.default_rng(0)
x = rng.uniform(-2, 2, (1500, 1)).astype(np.float32)
y = np.sin(2 * x[:, 0]) + (0.1 + np.abs(x[:, 0])) * rng.normal(size=1500).astype(np.float32)
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(network.parameters(), 0.01)
for _ in range(300):
    loss = torch.mean((network(torch.tensor(x[:500]))[:, 0] - torch.tensor(y[:500])) ** 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

# From the network to its intervals:
base = lambda x: jc.Point(network(torch.tensor(x))[:, 0].detach().numpy())
accrue = jc.accrue.fit(x[500:900], base(x[500:900]), y[500:900], key=jax.random.key(0))  # a std by the inputs
conformal = jc.conformal.fit(None, accrue(x[900:1200], base(x[900:1200])), y[900:1200])
forecast = conformal(None, accrue(x[1200:], base(x[1200:])))

print(conformal.guarantee(0.9))
print("of new rows:", jc.metrics.coverage(y[1200:], forecast))
