"""Holds what recipes train with: stages, batches, losses, rewards and rollouts."""
