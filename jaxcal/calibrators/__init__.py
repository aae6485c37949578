"""Calibrators: `fit(x, base, y) -> module`, and `module(x, base) -> Distribution`."""
