"""The seam with Ray Train: trainer, controller, worker group, placement, and the private names of
Ray that they touch.

The driver imports it; the loop never does. A new scheduler or backend for ranks would go beside it.
"""
