"""The two exceptions of the library."""


class SupportBasisError(Exception):
    """Base class of every error that supportbasis raises on purpose."""


class InputError(SupportBasisError, ValueError):
    """An argument cannot be used. The message names it, what came and what was expected."""
