"""Where a server begins to make requests wait, found by adding one at a time, and what the law predicts.

``client.py`` speaks to the server, ``ramp.py`` adds requests until one waits, ``predict.py`` says where the
first should, ``result.py`` compares the two.
"""
