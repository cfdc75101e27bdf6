"""The one exception tree. Each class carries its HTTP status and the OpenAI `type` and `code` it answers with."""

from __future__ import annotations

from typing import ClassVar

from loraserve.compat import StrEnum


class AdapterFault(StrEnum):
    """Stable codes of a refused adapter; the value is what clients see as `error.code`."""

    CORRUPT_WEIGHTS = "corrupt_weights"
    INVALID_CONFIG = "invalid_config"
    CONFIG_TOO_LARGE = "config_too_large"
    UNSUPPORTED_PEFT_TYPE = "unsupported_peft_type"
    UNSUPPORTED_VARIANT = "unsupported_variant"
    UNSUPPORTED_INIT = "unsupported_init"
    UNSUPPORTED_FORMAT = "unsupported_format"
    UNSUPPORTED_DTYPE = "unsupported_dtype"
    UNSUPPORTED_TASK = "unsupported_task"
    RANK_MISMATCH = "rank_mismatch"
    SHAPE_MISMATCH = "shape_mismatch"
    CONFIG_TENSOR_MISMATCH = "config_tensor_mismatch"
    RANK_TOO_LARGE = "rank_too_large"
    ZERO_SIZE = "zero_size"
    UNKNOWN_MODULE = "unknown_module"
    UNKNOWN_TENSOR = "unknown_tensor"
    MISSING_TENSORS = "missing_tensors"
    NO_LORA_TENSORS = "no_lora_tensors"
    UNSAFE_PICKLE = "unsafe_pickle"
    PATH_ESCAPE = "path_escape"
    INVALID_NAME = "invalid_name"
    NON_FINITE = "non_finite"
    MISSING_CONFIG = "missing_config"
    MISSING_WEIGHTS = "missing_weights"
    NOT_AN_ADAPTER = "not_an_adapter"
    ADAPTER_TOO_LARGE = "adapter_too_large"
    STAGING_FAILED = "staging_failed"


class LoraserveError(Exception):
    """Root of the tree; `message` is safe to show to a client."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    @property
    def http_status(self) -> int:
        """The status of this very error (some classes refine it by code)."""
        return self.status


class ConfigError(LoraserveError):
    """A flag or config field has a value that cannot be served."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_configuration"


class DemoModelUnavailable(LoraserveError):
    """The package that carries the demo model is not installed or is broken."""

    status = 503
    code = "demo_model_unavailable"


class ModelLoadError(LoraserveError):
    """The base model's files are missing, incomplete or do not fit its config."""

    status = 503
    code = "model_load_failed"


class UnsupportedModel(ModelLoadError):
    """The base model's architecture or a feature of it is not implemented."""

    code = "unsupported_model"


# -- requests -----------------------------------------------------------------------------------------------------


class InvalidRequest(LoraserveError):
    """A field of the request has a wrong type or value."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class UnsupportedField(InvalidRequest):
    """A field that would change the result is not supported; it is refused, never ignored."""

    code = "unsupported_field"


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus requested tokens do not fit the context or the KV pool."""

    code = "context_length_exceeded"


class InvalidToken(InvalidRequest):
    """A token id lies outside the vocabulary."""

    code = "invalid_token"


class ChatTemplateFailed(InvalidRequest):
    """An adapter's own chat template is broken, or takes too long; only chats with this adapter are concerned."""

    code = "chat_template_failed"


class PayloadTooLarge(InvalidRequest):
    """The request body is larger than the server reads."""

    status = 413
    code = "payload_too_large"


class AuthenticationFailed(LoraserveError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class PermissionDenied(LoraserveError):
    """The key is right but does not open this door."""

    status = 403
    type = "permission_error"
    code = "permission_denied"


class ModelNotFound(LoraserveError):
    """`model` names neither the base nor an adapter."""

    status = 404
    type = "not_found_error"
    code = "model_not_found"


class Overloaded(LoraserveError):
    """The waiting queue is full; try again later."""

    status = 429
    type = "rate_limit_error"
    code = "overloaded"


class RequestTimedOut(LoraserveError):
    """The request's own time limit passed."""

    status = 408
    type = "timeout_error"
    code = "request_timeout"


class RequestAborted(LoraserveError):
    """The request was ended by an operator (forced unload, shutdown) before it finished."""

    status = 503
    code = "request_aborted"


class NonFiniteLogits(LoraserveError):
    """The model's logits for this request are NaN or infinite; nothing can be sampled from them."""

    code = "non_finite_logits"


class EngineDead(LoraserveError):
    """The engine process ended; open requests are lost, the server restarts it."""

    status = 503
    code = "engine_dead"


class EngineStuck(EngineDead):
    """The engine process lives, but has not answered for long; it may come back."""

    code = "engine_stuck"


class EngineNotReady(LoraserveError):
    """The engine is still starting or is draining for shutdown."""

    status = 503
    code = "engine_not_ready"


# -- adapters -----------------------------------------------------------------------------------------------------


class AdapterError(LoraserveError):
    """Root of everything that concerns one adapter."""

    status = 400
    type = "invalid_request_error"
    code = "adapter_error"


class AdapterRefused(AdapterError):
    """The adapter cannot be served exactly; `fault` says why, with a stable code."""

    def __init__(self, fault: AdapterFault, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param)
        self.fault = fault
        self.code = fault.value

    @property
    def http_status(self) -> int:
        return 403 if self.fault is AdapterFault.PATH_ESCAPE else 400


class AdapterNotFound(AdapterError):
    """No adapter of that name (or hash prefix) is registered."""

    status = 404
    type = "not_found_error"
    code = "adapter_not_found"


class AdapterFailed(AdapterError):
    """The adapter is registered but could not be staged or made resident."""

    status = 503
    type = "server_error"
    code = "adapter_failed"


class NameTaken(AdapterError):
    """The name points at other content and `replace` was not given."""

    status = 409
    code = "name_taken"


class NameReserved(AdapterError):
    """The name is the served base model's."""

    status = 409
    code = "name_reserved"


class AdapterInUse(AdapterError):
    """Another operation on this name is under way."""

    status = 409
    code = "adapter_in_use"


class AmbiguousVersion(AdapterError):
    """A hash prefix fits more than one version."""

    status = 409
    code = "ambiguous_version"


class NoOlderVersion(AdapterError):
    """The name has no version before the one that it points at."""

    status = 409
    code = "no_older_version"


class BlendTooLarge(AdapterError):
    """The adapters of one request do not fit the device pool together."""

    code = "blend_too_large"


# -- store --------------------------------------------------------------------------------------------------------


class StorageFailed(AdapterError):
    """The store's folder or database cannot be read or written."""

    status = 503
    type = "server_error"
    code = "storage_failed"


class DiskFull(StorageFailed):
    """There is no room left for the adapter's files."""

    status = 507
    code = "disk_full"


# -- hub ----------------------------------------------------------------------------------------------------------


class HubError(AdapterError):
    """The Hub answered with an error, or not as a Hub does."""

    status = 502
    type = "server_error"
    code = "hub_error"


class RepoNotFound(HubError):
    """No such repository, or a private one without a valid token."""

    status = 404
    type = "not_found_error"
    code = "repo_not_found"


class RevisionNotFound(HubError):
    """The repository has no such branch, tag or commit."""

    status = 404
    type = "not_found_error"
    code = "revision_not_found"


class SubfolderNotFound(AdapterError):
    """The repository or folder has no such subfolder."""

    status = 404
    type = "not_found_error"
    code = "subfolder_not_found"


class SourceFailed(AdapterError):
    """An object store or web server could not be read."""

    status = 502
    type = "server_error"
    code = "source_failed"


class SourceTimeout(SourceFailed):
    """An object store or web server went silent."""

    status = 504
    code = "source_timeout"


class SourceNotFound(AdapterError):
    """There is nothing at that address."""

    status = 404
    type = "not_found_error"
    code = "source_not_found"


class HubAccessDenied(HubError):
    """The repository is gated and the token has no access."""

    status = 403
    type = "permission_error"
    code = "hub_access_denied"


class HubRateLimited(HubError):
    """The Hub asked to slow down, and waiting did not help."""

    status = 503
    code = "hub_rate_limited"


class HubTimeout(HubError):
    """The Hub did not answer in time."""

    status = 504
    code = "hub_timeout"


class HubChecksumMismatch(HubError):
    """Downloaded bytes are not the ones that the Hub announced."""

    code = "hub_checksum_mismatch"


def _all_classes(root: type[LoraserveError]) -> list[type[LoraserveError]]:
    found = [root]
    for child in root.__subclasses__():
        found += _all_classes(child)
    return found


def from_wire(code: str, message: str) -> LoraserveError:
    """Rebuild an error from `(code, message)` as sent between processes; unknown codes become the root class."""
    if code in AdapterFault._value2member_map_:
        return AdapterRefused(AdapterFault(code), message)
    for cls in _all_classes(LoraserveError):
        if cls is not AdapterRefused and cls.code == code:
            return cls(message)
    return LoraserveError(message)
