"""The tensor engine: every rank of a mesh runs the torch operations of the controller (docs/tensors.md)."""
