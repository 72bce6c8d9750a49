"""Time from providers to the first answer of hosts, compared with the providers' own start, Dask and Ray.

Each script prints measurements of one group of a peer; ``rows.py`` has the bars, ``__main__.py`` runs the scripts in
turn.
"""
