"""In the controller: meshes that hold sharded tensors, layouts, and what handles can do."""
