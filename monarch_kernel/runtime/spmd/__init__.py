"""Support for programs that run on all ranks: torchrun's environment, and process groups that survive failures."""
