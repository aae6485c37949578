"""Gaussian processes over a model's inputs and outputs: their kernels, and how their hyperparameters are found."""
