"""The models: what a model file describes, and the one decoder that computes it.

`registry` finds the architecture of a file, `architectures` says how each differs from a plain Llama, over the
`fields` and tensor `names` of both layouts and the `defaults` of fields that are not there, `rope` does the arithmetic
of rotary embedding, and `decoder` runs the `config` that comes out. A decoder knows the operations of `weft.ops` and
no array library.
"""
