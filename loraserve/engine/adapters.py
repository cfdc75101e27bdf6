"""The engine's adapter desk: load and drop calls from the server, answered when the residency is done with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from loraserve.engine.messages import AdapterStatus, ErrorInfo
from loraserve.errors import AdapterFailed, AdapterNotFound, InvalidRequest, LoraserveError
from loraserve.lora.format import parse_adapter
from loraserve.lora.residency import (
    AdapterDropped,
    AdapterFailedEvent,
    AdapterReady,
    AdapterResidency,
    ResidencyStats,
)
from loraserve.lora.spec import AdapterSpec, BaseGeometry
from loraserve.scheduler.request import AdapterUse

logger = logging.getLogger(__name__)

Done = Callable[[LoraserveError | None], None]


class AdapterDesk:
    """Takes load and drop calls; parsing and staging run in threads, answers come from `advance`."""

    def __init__(
        self,
        residency: AdapterResidency,
        geometry: BaseGeometry,
        max_rank: int,
        on_dropped: Callable[[str], object],
    ) -> None:
        self._residency = residency
        self._geometry = geometry
        self._max_rank = max_rank
        self._on_dropped = on_dropped
        self._parser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-parser")
        self._parsing: dict[str, tuple[Future[AdapterSpec], str, bool]] = {}
        self._loading: dict[str, list[Done]] = {}
        self._dropping: dict[str, list[Done]] = {}

    @property
    def busy(self) -> bool:
        """Whether any version is on its way in or out."""
        return bool(self._parsing or self._loading or self._dropping) or self._residency.busy

    def load(self, version: str, folder: str, pinned: bool, done: Done) -> None:
        """Start to parse and stage; a version that is already known is answered at once."""
        if version in self._loading:
            self._loading[version].append(done)
        elif self._residency.knows(version) and version not in self._dropping:
            self._residency.set_pinned(version, pinned)
            done(None)
        else:
            self._loading[version] = [done]
            future = self._parser.submit(parse_adapter, Path(folder), self._geometry, self._max_rank)
            self._parsing[version] = (future, folder, pinned)

    def drop(self, version: str, done: Done) -> None:
        """Unregister; answered when its last lease is gone and everything is freed."""
        if version in self._dropping:
            self._dropping[version].append(done)
        elif version in self._parsing:
            self._parsing.pop(version)[0].cancel()
            self._answer(self._loading, version, AdapterNotFound(f"adapter version {version[:12]} was unloaded again"))
            done(None)
        elif not self._residency.knows(version):
            done(None)
        else:
            self._dropping[version] = [done]
            self._residency.unregister(version)

    def prefetch(self, version: str, to_device: bool, idle_s: float) -> None:
        """Start to bring a version to the host or device. Raises `AdapterNotFound`."""
        self._residency.prefetch(version, to_device=to_device, idle_s=idle_s)

    def set_limits(self, device_bytes: int | None, host_bytes: int | None) -> None:
        """Change how much memory adapters may take."""
        self._residency.set_limits(device_bytes=device_bytes, host_bytes=host_bytes)

    def activate(self, adapters: Sequence[AdapterUse], prompt: Sequence[int]) -> tuple[AdapterUse, ...]:
        """The uses with the position from which each applies. Raises unless all versions are known and sound.

        Activated LoRAs that the prompt does not invoke are left out, which makes their requests the base's.
        """
        self._require(adapters)
        self._require_alone(adapters)
        starts = [self._residency.spec(use.version).first_token(prompt) for use in adapters]
        return tuple(
            use._replace(start=start) for use, start in zip(adapters, starts, strict=True) if start is not None
        )

    def hold(self, adapters: Sequence[AdapterUse]) -> None:
        """A request takes its versions. Raises, and holds nothing, unless all are known, sound and fit together."""
        self._require(adapters)
        versions = [use.version for use in adapters]
        if versions:
            self._residency.require_room(versions)
        for version in versions:
            self._residency.hold(version)

    def num_new_tokens(self, adapters: Sequence[AdapterUse]) -> int:
        """Token ids beyond the base's vocabulary that these known versions bring rows for."""
        return max((self._residency.spec(use.version).num_new_tokens for use in adapters), default=0)

    def _require_alone(self, adapters: Sequence[AdapterUse]) -> None:
        """Rows that replace the base's can be neither scaled nor added to another adapter's."""
        if len(adapters) == 1 and adapters[0].scale == 1.0:
            return
        for use in adapters:
            if self._residency.spec(use.version).replaced:
                raise InvalidRequest(
                    f"adapter version {use.version[:12]} replaces whole modules or token rows, so it is served alone "
                    "and at scale 1 only",
                    param="lora",
                )

    def _require(self, adapters: Sequence[AdapterUse]) -> None:
        for version, *_ in adapters:
            if not self._residency.knows(version) or version in self._dropping:
                raise AdapterNotFound(f"adapter version {version[:12]} is not loaded")
            failure = self._residency.failure(version)
            if failure is not None:
                # Raised by every request until the next try: it must not gather their frames.
                raise failure.with_traceback(None)

    def unhold(self, adapters: Sequence[AdapterUse]) -> None:
        """The request has ended."""
        for use in adapters:
            self._residency.unhold(use.version)

    def advance(self, max_bytes: int) -> bool:
        """Collect what the threads finished, copy at most `max_bytes` to the device, answer calls.

        True while an upload is under way, that is, while another call makes progress at once.
        """
        self._collect_parsed()
        uploading = self._residency.advance(max_bytes)
        for event in self._residency.take_events():
            match event:
                case AdapterReady(version=version):
                    self._answer(self._loading, version, None)
                case AdapterFailedEvent(version=version, error=error):
                    if version in self._loading:
                        # A refused load leaves nothing behind.
                        self._residency.unregister(version)
                    self._answer(self._loading, version, error)
                case AdapterDropped(version=version):
                    self._on_dropped(version)
                    self._answer(self._dropping, version, None)
        return uploading

    def statuses(self) -> list[AdapterStatus]:
        """State of every known version."""
        result = []
        for info in self._residency.infos():
            error = None if info.error is None else ErrorInfo.of(info.error)
            result.append(
                AdapterStatus(
                    version=info.version,
                    state=str(info.state),
                    residency=str(info.tier),
                    device_bytes=info.device_bytes,
                    host_bytes=info.host_bytes,
                    leases=info.leases,
                    error=error,
                )
            )
        return result

    def stats(self) -> ResidencyStats:
        """Counts and bytes of all tiers."""
        return self._residency.stats()

    def check(self) -> None:
        """Raise `AssertionError` if the device pool does not add up."""
        self._residency.check()

    def close(self) -> None:
        """Stop the threads."""
        self._parser.shutdown(wait=True, cancel_futures=True)
        self._residency.close()

    def _collect_parsed(self) -> None:
        for version, (future, folder, pinned) in list(self._parsing.items()):
            if not future.done():
                continue
            del self._parsing[version]
            try:
                self._residency.register(version, Path(folder), future.result(), pinned)
            except LoraserveError as error:
                self._answer(self._loading, version, error)
            except Exception:
                logger.exception("parsing adapter version %s failed", version[:12])
                self._answer(self._loading, version, AdapterFailed("the adapter could not be read"))

    @staticmethod
    def _answer(calls: dict[str, list[Done]], version: str, error: LoraserveError | None) -> None:
        for done in calls.pop(version, []):
            done(error)
