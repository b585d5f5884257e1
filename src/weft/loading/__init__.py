"""Downloads model files and reads them.

Model files are untrusted input: every length, count and offset is checked before use. The only array library here is
numpy.
"""
