"""Isolated Linux sandboxes, rollouts and trajectories for training language-model agents."""
