"""Intervals around a pipeline of scikit-learn, on a data frame with categories and missing values."""

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder

from jaxcal.sklearn import CalibratedRegressor

rng = np.random.default_rng(0)
frame = pd.DataFrame({"area": rng.uniform(30, 150, 600), "city": rng.choice(["Oslo", "Rome", "Bonn"], 600)})
price = 3 * frame["area"] + 100 * (frame["city"] == "Oslo") + frame["area"] * rng.normal(scale=0.3, size=600)
frame.loc[::10, "area"] = np.nan  # not known
train, test = frame[:500], frame[500:]

# From the model to its intervals:
encoder = make_column_transformer((OrdinalEncoder(), ["city"]), remainder="passthrough")
model = make_pipeline(encoder, HistGradientBoostingRegressor(categorical_features=[0], random_state=0))
calibrated = CalibratedRegressor(model, random_state=0).fit(train, price[:500])
intervals = calibrated.predict_interval(test, confidence_level=0.9)  # a data frame with the index of `test`

print(calibrated.guarantee_)
print("of new rows:", ((intervals["lower"] <= price[500:]) & (price[500:] <= intervals["upper"])).mean())
