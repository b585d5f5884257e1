"""The operations in C++: the decoder is recorded once into a native program, and one call per step runs it.

`recorder` is the ops interface, `weights` what a model's tensors become, `program` the decoder that runs.
"""
