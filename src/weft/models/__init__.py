"""Builds decoders and text models from their metadata and tensors.

- `registry`: finds the architecture of a checkpoint.
- `architectures`: how each architecture differs from Llama.
- `fields`, `names`, `defaults`: metadata keys, tensor names and default values, for GGUF and Hugging Face files.
- `rope`, `rope_fields`: the frequencies of rotary embedding.
- `config`, `loader`, `decoder`: the resulting configuration, and the forward pass. They use the operations of
  `weft.ops` and no array library.
- `encoder`, `encoder_architectures`: the same for BERT and its relatives.
- `text_model`: an encoder, or a decoder used as one, that makes vectors or scores of texts.
"""
