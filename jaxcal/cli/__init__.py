"""The command line: `jaxcal demo`, `calibrate`, `apply`, `monitor`, `methods` and `data`."""

from jaxcal.cli.app import app as app
