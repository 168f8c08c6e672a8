"""How a type is named: in messages, in files, and by plugins."""

from __future__ import annotations


def name_of_type(kind: type) -> str:
    """Where a type is defined and what it is called there.

    >>> name_of_type(dict)
    'builtins.dict'
    """
    return f"{kind.__module__}.{kind.__qualname__}"


def type_name(value: object) -> str:
    """The name of a value's type.

    >>> type_name(5)
    'builtins.int'
    """
    return name_of_type(type(value))
