"""Trains models to think in threads: batches, losses, rewards and rollouts."""
