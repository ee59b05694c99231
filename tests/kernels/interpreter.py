"""Once this is imported, Triton 3.6 interprets kernels beside numpy 2.4, too.

Triton 3.6 turns arrays with one element and one dimension into numbers, which numpy 2.4 refuses. Triton 3.7 does not.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any


def mend_index() -> None:
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


try:
    if version("triton").startswith("3.6."):
        mend_index()
except PackageNotFoundError:
    pass
