"""Every error a user may meet. `exit_code` is what the command line returns."""

from __future__ import annotations


class DustinError(Exception):
    """A failure at run time; the message names the value, what was expected and what to do."""

    exit_code = 1


class UsageError(DustinError):
    """An option or a combination of options that cannot work."""

    exit_code = 2


class ModelError(DustinError):
    """A model that is missing, damaged or of an unsupported architecture."""


class TokenizerMismatch(DustinError):
    """Target and draft do not share a token map."""


class ContextLengthError(UsageError):
    """A prompt that does not fit the context."""


class MemoryLimitError(DustinError):
    """Not enough memory for the KV cache."""


class NumericsError(DustinError):
    """NaN logits."""


class RankError(DustinError):
    """A rank of a tensor-parallel run that failed, ended or does not answer."""
