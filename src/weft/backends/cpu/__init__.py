"""The CPU backend: plans carried out with the operations of `weft.ops` in this process, in a thread of its own."""
