"""The CUDA backend: rows, KV cache and sampling are on the GPU. A step replays a CUDA graph or launches kernels."""
