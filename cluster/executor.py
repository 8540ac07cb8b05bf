"""RayExecutor: concurrent.futures on Ray, for work that testbed/ hands out without knowing Ray."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any


class RayExecutor(Executor):
    """Each submitted call is a Ray task of one core; results arrive as futures.

    Examples
    --------
    >>> with ray_session(), RayExecutor() as pool:  # doctest: +SKIP
    ...     simulate(scenario, requests=10_000, replications=8, executor=pool)
    """

    def __init__(self) -> None:
        import ray

        self._task = ray.remote(_call)
        self._references: list[Any] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        reference = self._task.remote(fn, args, kwargs)
        self._references.append(reference)
        return reference.future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        import ray

        if cancel_futures:
            for reference in self._references:
                ray.cancel(reference)
        elif wait and self._references:
            ray.wait(self._references, num_returns=len(self._references))


def _call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)
