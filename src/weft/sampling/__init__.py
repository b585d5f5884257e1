"""Sampling: the definition of the noise, and the reference sampler that every backend must match."""
