"""Sampling: the parameters, the noise, and the reference sampler that every backend must match."""
