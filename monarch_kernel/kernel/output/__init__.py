"""Route the output of ranks to cells, fold it, render it as text and HTML, and publish it. Render errors."""
