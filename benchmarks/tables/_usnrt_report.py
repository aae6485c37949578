"""USNRT's tables from finished runs: every run as CSV, and ours beside the published ones as Markdown."""


def write(records, datasets, path):
    print(len(records))
