"""What predictive distributions are worth: proper scores, calibration, sharpness.

Every metric is `metric(y, distribution, ...)`: targets [n] and a `Distribution` of n rows in, one number out; `pit`
and `observed_fractions` return arrays. `weights` [n] say how much each row counts, in means over rows and in empirical
distribution functions; they are not negative. All are pure and may be called inside `jit`, and under `vmap` over runs.
Lower is better, except for `improvement_ratio`, where higher is, and for `coverage`, `worst_group_coverage` and
`worst_slab_coverage`, which should be near the confidence level.
"""

import lazy_loader

# A name is loaded when it is first used: `__init__.pyi` has them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
