"""Calibrated, sharp predictive distributions from any regression model, in JAX.

A predictor is fitted from data, `fit(x, y, key=key)`, and called on inputs gives a Distribution. A calibrator is
fitted from somebody's predictions, `fit(x, base, y)`, and called on inputs and predictions gives a better one.
"""

import lazy_loader

__version__ = "0.1.0"

# A name is loaded when it is first used: `__init__.pyi` has them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
