"""TileLang's language as `T`, imported when a program is built: hosts that launch kernels may have none."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tilelang.language as T
else:

    class _Language:
        def __getattr__(self, name: str) -> object:
            import tilelang.language

            return getattr(tilelang.language, name)

    T = _Language()
