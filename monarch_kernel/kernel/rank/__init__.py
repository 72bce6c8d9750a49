"""The part of the kernel that runs in ranks: the actors that `%mesh` spawns there, and IPython for their cells."""
