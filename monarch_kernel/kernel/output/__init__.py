"""Routes the output of ranks to cells, folds it, renders it as text and HTML, and publishes it; also renders errors."""
