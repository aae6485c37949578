"""Intervals around a LightGBM model that was fitted before, by rows that it was not fitted to."""

import numpy as np
from lightgbm import LGBMRegressor

from jaxcal.sklearn import CalibratedRegressor

rng = np.random.default_rng(0)
x = np.where(rng.uniform(size=(1500, 3)) < 0.1, np.nan, rng.normal(size=(1500, 3)))  # a tenth is missing
y = np.nan_to_num(x[:, 0]) ** 2 + rng.normal(size=1500)
model = LGBMRegressor(verbosity=-1).fit(x[:500], y[:500])

# From the model to its intervals:
calibrated = CalibratedRegressor(model, method="prefit", random_state=0).fit(x[500:1000], y[500:1000])
lower, upper = calibrated.predict_interval(x[1000:], confidence_level=0.9).T

print(calibrated.guarantee_)
print("of new rows:", ((lower <= y[1000:]) & (y[1000:] <= upper)).mean())
