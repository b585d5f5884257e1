"""Capacity planning: replicas of the real scheduler on a virtual clock, with step times that were measured."""
