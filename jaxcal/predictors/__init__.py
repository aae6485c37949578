"""Models fitted from data: `fit(x, y, *, key, ...)` gives a module, and `module(x)` a Distribution."""
