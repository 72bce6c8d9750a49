"""The tensor engine: torch operations of the controller, run by every rank of a mesh (docs/tensors.md)."""
