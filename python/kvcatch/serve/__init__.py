"""An OpenAI-compatible server over the engine.

``schema.py`` is what a body may hold, ``completions.py`` and ``chat.py`` turn deltas into OpenAI's answers,
``app.py`` joins them to the engine, ``server.py`` runs it until it is told to stop.
"""
