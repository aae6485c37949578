"""The command line: `jaxcal demo`, `calibrate`, `apply`, `monitor`, `methods` and `data`."""

from jaxcal.cli.app import app

__all__ = ["app"]
