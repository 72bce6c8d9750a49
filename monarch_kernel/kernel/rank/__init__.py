"""The kernel's code in ranks: the actors that `%mesh` spawns there, and IPython for their cells."""
