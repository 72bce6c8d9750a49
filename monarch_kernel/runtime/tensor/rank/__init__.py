"""The ranks' side of the tensor engine, which runs records. Values are plain tensors, or DTensors of a sharded mesh."""
