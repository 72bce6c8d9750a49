"""The controller's side of sharded tensors: their meshes, layouts and operations of handles."""
