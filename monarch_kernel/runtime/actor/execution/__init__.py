"""Actors in the process that holds them: mailbox, driver thread, interrupts, and how they fail."""
