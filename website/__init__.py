"""The documentation as a site: pages that are generated from the code, and the notebooks with recorded outputs."""
