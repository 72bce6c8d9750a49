"""The controller's side of training: modules and optimizers of the program, with parameters on the ranks."""
