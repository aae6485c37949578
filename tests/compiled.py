"""What is compiled while something runs: programs that were there before are not."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """Collects the names of the functions that are compiled meanwhile."""
    compiled = []

    def listen(event: str, duration: float, **about) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(about["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
