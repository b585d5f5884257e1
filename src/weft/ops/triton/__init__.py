"""The operations on a CUDA device, in torch and Triton. The decoder is recorded once into a list of launches.

`ops` is the ops interface, `weights` holds the loaded tensors, `program` runs a step. The kernels are in `linear`,
`rows`, `mixture`, `rope`, `attention_*`, `store` and `sampling*`. Importing any of them imports torch.
"""
