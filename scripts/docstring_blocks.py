"""For mkdocstrings: show the examples and the drawn trees of a docstring as code.

A paragraph that begins with ``>>>``, or that draws a tree with ``├──``, becomes a fenced block.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_FLAG = re.compile(r" +# doctest: \+\w+")


def with_fences(text: str) -> str:
    """Return a docstring with fences around such paragraphs.

    >>> print(with_fences("Add.\\n\\n>>> add(1, 2)  # doctest: +SKIP\\n3"))
    Add.
    <BLANKLINE>
    ```python
    >>> add(1, 2)
    3
    ```
    """

    def fenced(paragraph: str) -> str:
        if paragraph.lstrip().startswith(">>>"):
            return f"```python\n{_FLAG.sub('', paragraph)}\n```"
        return f"```text\n{paragraph}\n```" if "├──" in paragraph else paragraph

    return "\n\n".join(map(fenced, text.split("\n\n")))


class DocstringBlocks(griffe.Extension):
    """Applies ``with_fences`` to every docstring that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_fences(obj.docstring.value)
