"""What the kernel runs in ranks: the actors that `%mesh` spawns there, and the IPython that their cells see."""
