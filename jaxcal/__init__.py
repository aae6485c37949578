"""Calibrated, sharp predictive distributions from any regression model, in JAX.

A predictor is fitted to data, `fit(x, y, key=key)`. Called on inputs, it gives a Distribution. A calibrator is fitted
to existing predictions, `fit(x, base, y)`. Called on inputs and predictions, it gives better distributions.
"""

import lazy_loader

__version__ = "0.1.0"

# A name is loaded when it is first used; `__init__.pyi` lists the names.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
