"""The commands that a user types at a prompt, in a magic or in a terminal: their grammar, effects and output."""
