"""Output of ranks in the controller: subscriptions, the terminal of a script, and answers that wait for output."""
