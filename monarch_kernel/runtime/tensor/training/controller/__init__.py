"""The controller's side: modules and optimizers of the program, with parameters on the ranks."""
