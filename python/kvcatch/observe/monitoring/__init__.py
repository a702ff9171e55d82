"""Dashboards for Grafana and alert rules for Prometheus, as files that ship with the package."""

from __future__ import annotations

from importlib.resources import files

from kvcatch.errors import InvalidArgument

__all__ = ["FILES", "read_file"]

FILES = {
    "kvcatch.json": "Grafana dashboard for kvcatch's engine",
    "vllm.json": "Grafana dashboard for vLLM 0.6 to 0.33",
    "alerts.yml": "Prometheus alert rules for both",
}
"""What there is, by name."""


def read_file(name: str) -> str:
    """The text of one of :data:`FILES`.

    Raises:
        InvalidArgument: There is none of that name.
    """
    if name not in FILES:
        raise InvalidArgument(f"name = {name!r}: must be one of {', '.join(FILES)}")
    return files(__name__).joinpath(name).read_text(encoding="utf-8")
