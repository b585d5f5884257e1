"""Model files: fetch them, read them, and name their tensors as the decoder does.

Everything here treats a file as hostile input. It hands on numpy buffers and plain values and knows no other
array library.
"""
