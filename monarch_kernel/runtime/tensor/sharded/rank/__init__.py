"""The ranks' side of sharded tensors: run operations with DTensor where it is correct, otherwise with own rules."""
