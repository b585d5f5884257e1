"""The models: what a model file describes (`config`, `registry`), and the one decoder that computes it (`decoder`).

A decoder knows the operations of `weft.ops` and no array library.
"""
