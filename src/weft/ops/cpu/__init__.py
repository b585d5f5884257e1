"""The operations in C++: the decoder is recorded once into a C++ program, and each step is one call of it.

`recording_ops` is the ops interface, `weights` packs the tensors of a model, `program` builds and runs the program.
"""
