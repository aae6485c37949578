"""Metrics of predictive distributions: proper scores, calibration, sharpness.

Every metric is `metric(y, distribution, ...)`. It takes targets [n] and a `Distribution` of n rows, and returns one
number; `pit` and `observed_fractions` return arrays. `weights` [n] say how much each row counts, in means over rows and
in empirical distribution functions. They are not negative. All metrics are pure, and may be called inside `jit` and
under `vmap` over runs.

Lower is better, with these exceptions:

- `improvement_ratio`: higher is better.
- `coverage`, `worst_group_coverage`, `worst_slab_coverage`: they should be near the confidence level.
"""

import lazy_loader

# A name is loaded when it is first used: `__init__.pyi` has them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
