"""How long hosts take from engines to the first answer, beside the engines' own start and beside Dask and Ray.

Each script prints measurements of one group of a peer; ``rows.py`` has the bars, ``__main__.py`` runs them in turn.
"""
