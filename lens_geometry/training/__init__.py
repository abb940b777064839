"""Training small models with and without suppression, in plain PyTorch and TransformerLens hooks."""
