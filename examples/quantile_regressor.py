"""Quantiles of a model, which cross and cover too little, made to cover: conformalized quantile regression."""

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor

import jaxcal as jc

rng = np.random.default_rng(0)
x = rng.uniform(-2, 2, (2000, 2))
y = x[:, 0] + np.exp(x[:, 1]) * rng.normal(size=2000)
train, calibration, test = np.split(np.arange(2000), [800, 1400])
levels = np.array([0.05, 0.5, 0.95])
boosting = [HistGradientBoostingRegressor(loss="quantile", quantile=level) for level in levels]
models = [model.fit(x[train], y[train]) for model in boosting]

# From the models to intervals that cover:
values = lambda rows: np.column_stack([model.predict(x[rows]) for model in models])
base = lambda rows: jc.Quantiles(levels, values(rows), sort=True)
options = {"score": "quantile", "confidence_levels": [0.9]}
calibrated = jc.conformal.fit(x[calibration], base(calibration), y[calibration], **options)
forecast = calibrated(x[test], base(test))

print(calibrated.guarantee(0.9))
print("before:", jc.metrics.coverage(y[test], base(test)), "after:", jc.metrics.coverage(y[test], forecast))
