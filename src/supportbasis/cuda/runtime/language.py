# mypy: ignore-errors
"""Triton, where it is installed.

Kernels are decorated with `jit` from here, so that their modules can be imported without Triton;
none runs then (`engine.dispatch`). A tensor that a kernel may do without is None: known when it is
compiled, so that no switch has to say it again.
"""

from __future__ import annotations

from ...engine.dispatch import interpreted

try:
    import triton
    import triton.language as tl
except ImportError:  # an optional package
    triton = tl = None

__all__ = ["cdiv", "interpreted", "jit", "power_of_two", "store_tile", "tile_of", "tl"]


def jit(function):
    """`triton.jit`, or the function itself where Triton is missing."""
    return function if triton is None else triton.jit(function)


@jit
def tile_of(x, row, here, columns, stride, width):
    """Rows of a matrix; zero where there is none."""
    return tl.load(
        x + row[:, None] * stride + columns[None, :],
        mask=here[:, None] & (columns < width)[None, :],
        other=0.0,
    )


@jit
def store_tile(x, tile, row, here, columns, width):
    """Write rows of a contiguous matrix, in its dtype."""
    target = x + row[:, None] * width + columns[None, :]
    tl.store(target, tile.to(x.dtype.element_ty), mask=here[:, None] & (columns < width)[None, :])


if triton is not None and interpreted():
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patched(tensor, scope):
        """Triton 3.6 takes loop bounds from arrays of one entry by int, which NumPy 2.4 refuses."""
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patched


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(n: int, least: int = 16) -> int:
    """Smallest power of two that is at least n."""
    return max(least, 1 << max(n - 1, 0).bit_length())
