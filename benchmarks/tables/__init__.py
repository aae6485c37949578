"""One script per paper: it runs the paper's table and prints our numbers beside the published ones."""
