"""Gives each rank a run of a model's layers with their weights, through which the samples of a batch go one by one."""
