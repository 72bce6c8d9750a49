"""`%mesh` and `%%mesh`: the subcommands, their arguments, and completion."""
