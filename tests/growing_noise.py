"""Rows whose noise grows, which networks with a std are fitted to in tests, alike: they share what is compiled."""

from typing import Any

import jax
import numpy as np

ROWS = 2000
SETTING: dict[str, Any] = {
    "key": jax.random.key(0),
    "hidden": (16,),
    "batch_size": 200,
    "max_epochs": 200,
    "patience": 20,
    "learning_rate": 0.02,
}


def mean(x):
    return 3 * np.sin(x)


def std(x):
    return np.exp(x / 2)


def draw(rng):
    """Rows whose std grows sevenfold from left to right."""
    x = rng.uniform(-2, 2, size=ROWS)
    return x, mean(x) + std(x) * rng.normal(size=ROWS)
