"""The operations on a CUDA device, in torch and Triton: the decoder is recorded once into a list of launches.

`ops` is the ops interface, `weights` what a model's tensors become, `program` what runs a step; the kernels are in
`linear`, `rows`, `mixture`, `rope` and the two of attention. Importing any of them imports torch.
"""
