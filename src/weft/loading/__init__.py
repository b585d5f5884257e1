"""Model files: fetch them, and read what they hold.

Everything here treats a file as hostile input. It hands on numpy buffers and plain values and knows no other
array library.
"""
