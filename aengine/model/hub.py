"""Models named by a Hub id; needs the optional package `huggingface_hub`."""

from __future__ import annotations

import re
from pathlib import Path

from aengine.errors import ModelUnavailableError

__all__ = ["is_hub_id", "snapshot"]

FILES = ["*.json", "*.jinja", "*.safetensors"]


def is_hub_id(source: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", source, flags=re.ASCII) is not None


def snapshot(hub_id: str) -> Path:
    """The local folder of the model, fetched if need be; `ModelUnavailableError` when it cannot be had."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelUnavailableError(
            f"{hub_id!r} is not a path here, and to fetch it from the Hub the package huggingface_hub must be installed"
        ) from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=FILES))
    except Exception as error:  # it raises its own, those of its HTTP library, and OSError
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelUnavailableError(
            f"{hub_id!r} is not a path here and could not be fetched from the Hub: {reason}"
        ) from error
