"""Figures beside those of our peers; not part of ``make test``."""
