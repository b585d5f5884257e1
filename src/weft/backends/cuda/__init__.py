"""The CUDA backend: rows, cache and sampling live on the card; a step is one replay of a graph, or some launches."""
