"""Kept meshes: meshes that outlive the controller that started them."""
