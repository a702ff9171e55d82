"""Prometheus metrics of kvcatch's own pool and engine.

``source.py`` is what an engine fills, ``histogram.py`` what it counts in, ``collector.py`` turns both into
metrics, ``exporter.py`` ties them together. The engine's step never makes text: a look takes plain numbers
between two steps, everything else happens in the thread of who asks.
"""
