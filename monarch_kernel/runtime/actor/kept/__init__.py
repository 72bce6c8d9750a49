"""Kept meshes: those that outlive the controller that started them."""
