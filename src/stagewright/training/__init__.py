"""Training runs: the configuration, recipes, logs, the loop over steps and epochs."""
