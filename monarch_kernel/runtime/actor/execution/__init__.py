"""Actors in their process: mailbox, driver thread, interrupts, and how they fail."""
