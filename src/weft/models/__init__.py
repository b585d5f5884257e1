"""Builds the decoder of a model from its metadata and tensors.

- `registry`: finds the architecture of a checkpoint.
- `architectures`: how each architecture differs from Llama.
- `fields`, `names`, `defaults`: metadata keys, tensor names and default values, for GGUF and Hugging Face files.
- `rope`, `rope_fields`: the frequencies of rotary embedding.
- `config`, `decoder`: the resulting configuration, and the forward pass. They use the operations of `weft.ops` and no
  array library.
"""
