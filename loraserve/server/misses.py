"""How often each tenant may make the server ask the Hub in vain, whatever names and tokens it tries."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from loraserve.errors import Overloaded

BURST, EACH_S = 16, 4.0
"""So many questions in vain at once, and one more after each such time."""

MAX_TENANTS = 4096


class Misses:
    """A bucket per tenant. A question is paid for when it is asked, and given back if the Hub said yes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._spent: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tenant → how much, at which time

    def check(self, tenant: str) -> None:
        """Raises `Overloaded` if the tenant may not ask now."""
        spent = self._now(tenant)
        if spent > BURST - 1:
            wait = (spent - (BURST - 1)) * EACH_S
            raise Overloaded(f"too many adapters or tokens that the Hub does not know; try again in {wait:.0f} s")

    def spend(self, tenant: str) -> None:
        """A question is asked. Raises as `check`."""
        self.check(tenant)
        self._set(tenant, self._now(tenant) + 1)

    def give_back(self, tenant: str) -> None:
        """The answer was yes."""
        self._set(tenant, max(0.0, self._now(tenant) - 1))

    def _now(self, tenant: str) -> float:
        spent, since = self._spent.get(tenant, (0.0, 0.0))
        return max(0.0, spent - (self._clock() - since) / EACH_S)

    def _set(self, tenant: str, spent: float) -> None:
        self._spent.pop(tenant, None)
        if spent > 0:
            self._spent[tenant] = (spent, self._clock())
        if len(self._spent) > MAX_TENANTS:
            self._spent.popitem(last=False)
