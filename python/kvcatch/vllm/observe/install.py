"""Switches observing on: patches vLLM's Scheduler, and publishes each engine core's observer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvcatch.errors import KvcatchError
from kvcatch.vllm.observe.address import Listen, socket_path
from kvcatch.vllm.observe.hooks import WANTED, is_watched, watch
from kvcatch.vllm.observe.pages import EnginePages, Names
from kvcatch.vllm.observe.publish import Publisher
from kvcatch.vllm.observe.tags import Tagger

if TYPE_CHECKING:
    from kvcatch.vllm.observe.observer import Observer
    from kvcatch.vllm.settings import Settings
    from kvcatch.vllm.versions import Shape

__all__ = ["install", "publisher", "uninstall"]

_log = logging.getLogger("vllm.kvcatch.observe")

_KEEP = 512
_PAGE_BYTES = 2 * 2**20

_state: dict[str, Any] = {}


def publisher() -> Publisher | None:
    """What this process publishes; None where it does not."""
    return _state.get("publisher")


def install(shape: Shape, settings: Settings) -> bool:
    """Observe every Scheduler that this process makes from now on.

    Args:
        shape: Not needed: the methods wrapped here are looked for by name.
        settings: The plugin's; ``socket``, ``listen``, ``token``, ``tag_pattern`` and ``top_k`` are read.

    Returns:
        Whether it is on; where not, one log line says why and vLLM is untouched.
    """
    del shape
    try:
        from vllm.v1.core.sched.scheduler import Scheduler

        if is_watched(Scheduler):
            return True
        missing = [name for name in WANTED if not callable(getattr(Scheduler, name, None))]
        if missing:
            _log.warning("kvcatch: observe is off: vLLM's Scheduler has no %s", ", ".join(missing))
            return False
        tagger = Tagger.parse(settings.tag_pattern)
        import prometheus_client  # noqa: F401
    except ImportError as error:
        _log.warning("kvcatch: observe is off: %s; pip install kvcatch[vllm]", error)
        return False
    except KvcatchError as error:
        _log.warning("kvcatch: observe is off: %s", error)
        return False

    def started(observer: Observer) -> None:
        try:
            _publish(observer, settings)
        except Exception as error:
            _log.warning("kvcatch: observe is not published: %s: %s", type(error).__name__, error)

    watch(Scheduler, tagger, _KEEP, started)
    return True


def uninstall() -> None:
    """Stop publishing; ``kvcatch.vllm.unregister`` puts vLLM's own methods back."""
    if (serving := _state.pop("publisher", None)) is not None:
        serving.close()


def _publish(observer: Observer, settings: Settings) -> None:
    """Publish an engine core; in a process that makes a second one, the newest is shown."""
    config = observer.scheduler.vllm_config
    parallel = getattr(config, "parallel_config", None)
    rank = getattr(parallel, "data_parallel_index", None)
    if not isinstance(rank, int):
        rank = getattr(parallel, "data_parallel_rank", 0)
    names = _names(config, rank if isinstance(rank, int) else 0)
    pages = EnginePages(
        observer,
        names,
        settings.top_k,
        _blocks_per_page(observer.scheduler),
    )
    served = _Newest(pages)
    known = _state.get("publisher")
    if known is not None:
        known.pages.show(pages)
        return
    made = Publisher(served, served.check_idle)
    path = socket_path(settings.socket, f"engine-{names.rank}")
    is_on = path is not None and made.serve_socket(path)
    if settings.listen:
        try:
            listen = Listen.parse(settings.listen, settings.token or None, names.rank)
            is_on |= made.serve_port(listen)
        except KvcatchError as error:
            _log.warning("kvcatch: observe is not published on a port: %s", error)
    if is_on:
        _state["publisher"] = made
    else:
        made.close()


def _names(config: Any, rank: int) -> Names:
    import vllm

    import kvcatch

    model = getattr(config, "model_config", None)
    served = getattr(model, "served_model_name", None) or getattr(model, "model", "")
    if isinstance(served, (list, tuple)):
        served = served[0] if served else ""
    return Names(str(served), rank, str(vllm.__version__), str(kvcatch.__version__))


def _blocks_per_page(scheduler: Any) -> int:
    """Blocks of one layer in 2 MiB, the least that a driver gives or takes; 0 where that is not known."""
    groups = getattr(scheduler.kv_cache_config, "kv_cache_groups", ())
    spec = groups[0].kv_cache_spec if groups else None
    size = getattr(spec, "page_size_bytes", 0)
    return max(1, _PAGE_BYTES // size) if isinstance(size, int) and size > 0 else 0


class _Newest:
    """Pages of the newest scheduler of this process."""

    def __init__(self, pages: EnginePages) -> None:
        self._pages = pages

    def show(self, pages: EnginePages) -> None:
        """Show another one from now on."""
        self._pages = pages

    def page(self, path: str, *, is_whole: bool = False) -> tuple[str, bytes] | None:
        """A page of it."""
        return self._pages.page(path, is_whole=is_whole)

    def check_idle(self) -> str | None:
        """Its check at idle."""
        return self._pages.check_idle()
