"""What goes wrong with the Hub: which error it becomes, and whether trying again helps."""

from __future__ import annotations

import contextlib
import errno
import importlib
import logging
from collections.abc import Callable
from time import sleep
from typing import TypeVar

import httpx
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from loraserve.errors import (
    DiskFull,
    HubAccessDenied,
    HubError,
    HubRateLimited,
    HubTimeout,
    LoraserveError,
    RepoNotFound,
    RevisionNotFound,
)
from loraserve.lora.strict_json import show

logger = logging.getLogger(__name__)

ATTEMPTS = 4
MAX_RETRY_AFTER_S = 30.0

_T = TypeVar("_T")


def _of_client(name: str) -> tuple[type[Exception], ...]:
    """An exception class of the HTTP library under `huggingface_hub`, which its versions 2 changed."""
    found = [getattr(httpx, name)]
    with contextlib.suppress(ImportError):
        found.append(getattr(importlib.import_module("httpx2"), name))
    return tuple(found)


_TIMEOUTS = _of_client("TimeoutException")
_TRANSPORT = _of_client("TransportError")


def retrying(call: Callable[[], _T], repo: str, revision: str | None) -> _T:
    """Call the Hub, again where that helps. Raises what `map_error` makes of the last failure."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return call()
        except Exception as error:
            mapped = map_error(error, repo, revision)
            wait = _wait_before_retry(error, attempt)
            if wait is None or attempt == ATTEMPTS:
                raise mapped from error
            logger.warning("the Hub failed for %s (%s); trying again in %.1f s", repo, mapped.code, wait)
            sleep(wait)
    raise AssertionError("unreachable")


def map_error(error: Exception, repo: str, revision: str | None) -> LoraserveError:
    """The named error for whatever the client raised; addresses and tokens are not repeated."""
    cause = _root(error)
    if isinstance(cause, _TIMEOUTS):
        return HubTimeout(f"the Hub did not answer in time for {repo}")
    match cause:
        case GatedRepoError():
            return HubAccessDenied(f"{repo} is gated and this token has no access", param="token")
        case RepositoryNotFoundError():
            return RepoNotFound(f"{repo} does not exist, or is private and the token does not open it")
        case RevisionNotFoundError():
            return RevisionNotFound(f"{repo} has no revision {show(revision)}", param="revision")
        case HFValidationError():
            return RepoNotFound(f"{show(repo)} is not the name of a repository")
        case OfflineModeIsEnabled():
            return HubError("the Hub may not be asked (HF_HUB_OFFLINE)")
        case HfHubHTTPError():
            return _map_status(cause.response.status_code, repo)
        case OSError(errno=errno.ENOSPC | errno.EDQUOT):
            return DiskFull("no room left for the adapter's files in the Hub cache")
        case LoraserveError():
            return cause
    return HubError(f"the Hub could not be read for {repo}: {type(cause).__name__}")


def _map_status(status: int, repo: str) -> LoraserveError:
    if status == 429:
        return HubRateLimited(f"the Hub limits requests; {repo} was not fetched")
    if status in (401, 404):
        return RepoNotFound(f"{repo} does not exist, or is private and the token does not open it")
    if status == 403:
        return HubAccessDenied(f"the token has no access to {repo}", param="token")
    return HubError(f"the Hub answered {status} for {repo}")


def _wait_before_retry(error: Exception, attempt: int) -> float | None:
    """Seconds to wait, or None if trying again cannot help."""
    backoff = 0.5 * 2.0 ** (attempt - 1)
    cause = _root(error)
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        if status != 429 and status < 500:
            return None
        asked = str(cause.response.headers.get("Retry-After", ""))
        if not (asked.isascii() and asked.isdigit()):
            return backoff
        return float(asked) if float(asked) <= MAX_RETRY_AFTER_S else None
    if isinstance(cause, _TIMEOUTS):
        # It has waited long already: once more, not three times.
        return backoff if attempt == 1 else None
    return backoff if isinstance(cause, _TRANSPORT) else None


def _root(error: BaseException) -> BaseException:
    """The client wraps failed requests in `LocalEntryNotFoundError`; what happened is its cause."""
    while isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error
