"""The controller's side of the tensor engine: handles of values on the ranks, and the stream of records."""
