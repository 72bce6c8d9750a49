"""What a person types at a prompt, in a magic or in a terminal: its grammar, what it does, and how that is shown."""
