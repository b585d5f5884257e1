"""The models that make vectors and scores: their texts, their engines, and fair sharing of them."""
