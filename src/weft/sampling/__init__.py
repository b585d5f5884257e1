"""Sampling: the definition of the noise, the parameters as samplers get them, and the reference sampler that every
backend must match."""
