"""Who may call what: API keys open /v1, the admin key opens everything."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from loraserve.config import ServerConfig
from loraserve.errors import AuthenticationFailed, PermissionDenied


class Auth:
    """Checks the `Authorization` header. Keys are compared as digests, all of them, in constant time."""

    def __init__(self, config: ServerConfig) -> None:
        self._api = [_digest(key) for key in config.api_key]
        self._admin = None if config.admin_key is None else _digest(config.admin_key)
        self._loopback = is_loopback(config.host)
        self._open_doors = config.open_lora_doors

    def check_api(self, header: str | None) -> str:
        """Let a caller of /v1 in; returns its tenant. Raises `AuthenticationFailed`.

        Without API keys all callers are one tenant, but for the one that shows the admin key.
        """
        key = _key_of(header)
        if not self._api:
            return self._tenant(key) if self._is_admin(key) else ""
        # No short cut between the two: which list a key is in must not show in the time.
        known = self._is_api(key) | self._is_admin(key)
        if not known:
            raise AuthenticationFailed("no API key was given" if key is None else "the API key is wrong")
        return self._tenant(key)

    def check_admin(self, header: str | None) -> str:
        """Let an operator in; returns its tenant, as at /v1. Raises `AuthenticationFailed` or `PermissionDenied`."""
        if self._admin is None:
            if not self._loopback:
                raise PermissionDenied("admin endpoints need --admin-key when the server listens beyond this machine")
            key = _key_of(header)
            return self._tenant(key) if self._is_api(key) else ""
        key = _key_of(header)
        if self._is_admin(key):
            return self._tenant(key)
        if self._is_api(key):
            raise PermissionDenied("this key opens /v1, but not the admin endpoints")
        raise AuthenticationFailed("no admin key was given" if key is None else "the admin key is wrong")

    def check_door(self, header: str | None) -> tuple[str, bool]:
        """Let a controller of another server in: as an operator, or with `--open-lora-doors` as any caller of /v1.

        Returns its tenant, and whether it is an operator. Raises as `check_admin` or `check_api`.
        """
        try:
            return self.check_admin(header), True
        except (AuthenticationFailed, PermissionDenied):
            if not self._open_doors:
                raise
            return self.check_api(header), False

    @staticmethod
    def _tenant(key: str | None) -> str:
        return "" if key is None else _digest(key).hex()[:16]

    def _is_api(self, key: str | None) -> bool:
        found = False
        for known in self._api:
            found |= key is not None and hmac.compare_digest(_digest(key), known)
        return found

    def _is_admin(self, key: str | None) -> bool:
        return key is not None and self._admin is not None and hmac.compare_digest(_digest(key), self._admin)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _key_of(header: str | None) -> str | None:
    if header is None:
        return None
    scheme, _, key = header.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        return None
    return key.strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
