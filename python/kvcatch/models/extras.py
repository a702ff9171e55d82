"""The optional packages a model needs, imported where they are used."""

from __future__ import annotations

import importlib
from typing import Any

from kvcatch.errors import MissingExtra

__all__ = ["need"]


def need(module: str) -> Any:
    """Import a module of the ``engine`` extra.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        wanted = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != wanted:
            raise
        raise MissingExtra(
            f"running a model needs {wanted}: pip install kvcatch[engine]"
        ) from error
