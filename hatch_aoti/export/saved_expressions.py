"""Sizes and guards in a saved program: texts that torch would evaluate, and that are only arithmetic here."""

from __future__ import annotations

import ast
import math
import re
from typing import TYPE_CHECKING, Any, Final

from hatch_aoti.errors import SavedProgramError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["UNTRUSTED", "check_guard", "check_size", "nodes"]


UNTRUSTED: Final = "do not load this file with torch either; get the program from its author again"


# sympy's own constructors, and those of `torch/utils/_sympy/functions.py`.
_SIZE_FUNCTIONS: Final = frozenset({
    "Abs", "Add", "And", "Eq", "Equality", "ExprCondPair", "Ge", "GreaterThan", "Gt", "ITE", "Integer", "Le",
    "LessThan", "Lt", "Max", "Min", "Mod", "Mul", "Ne", "Not", "Or", "Piecewise", "Pow", "Rational",
    "StrictGreaterThan", "StrictLessThan", "Unequality", "ceiling", "floor", "sqrt",
    "CeilDiv", "CeilToInt", "CleanDiv", "FloatPow", "FloatTrueDiv", "FloorDiv", "FloorToInt", "Identity", "IntTrueDiv",
    "IsNonOverlappingAndDenseIndicator", "LShift", "ModularIndexing", "PowByNatural", "PythonMod", "RShift",
    "RoundDecimal", "RoundToInt", "ToFloat", "TruncToFloat", "TruncToInt", "Where",
})  # fmt: skip


_GUARD_NAMES: Final = frozenset({"L", "abs", "bool", "float", "int", "len", "math", "max", "min", "round"})


_GUARD_ATTRIBUTES: Final = frozenset({
    "ceil", "dim", "floor", "inf", "isnan", "ndim", "numel", "pow", "shape", "size", "sqrt", "storage_offset", "stride",
    "trunc",
})  # fmt: skip


_GUARD_NODES: Final = (
    ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare,
    ast.Constant, ast.Name, ast.Call, ast.Subscript, ast.Attribute,
)  # fmt: skip


def nodes(spec: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a tree of containers, as torch writes it, and all trees in it."""
    yield spec
    for child in spec["children_spec"]:
        yield from nodes(child)


def check_size(text: str) -> None:
    """Refuse what is no arithmetic on sizes, as sympy's `srepr` writes it: sympy evaluates it as Python.

    Also what takes for ever to evaluate: sizes have 64 bits, powers of them are small, and no program has long sums.
    """
    expression = _expression(text)
    if not _is_size(expression) or not _is_small(expression):
        raise _foreign_expression(text)


def _is_size(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=int() | float()):  # booleans included
            return True
        case ast.Name(id=name):
            return not name.startswith("__")
        case ast.UnaryOp(operand=operand):
            return _is_size(operand)
        case ast.BinOp(left=left, right=right):
            return _is_size(left) and _is_size(right)
        case ast.BoolOp(values=values):
            return all(map(_is_size, values))
        case ast.Compare(left=left, comparators=others):
            return all(map(_is_size, [left, *others]))
        case ast.Call(func=ast.Name(id="Symbol" | "Float"), args=[ast.Constant(value=str(text))], keywords=words):
            # As in "Symbol('s77', positive=True, integer=True)" and "Float('0.5', precision=53)".
            return bool(re.fullmatch(r"\w+|[\d.e+-]+", text)) and all(_is_size(word.value) for word in words)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]):
            return name in _SIZE_FUNCTIONS and all(map(_is_size, arguments))
    return False


_MOST_NODES: Final = 5000


_MOST_DEGREE: Final = 64  # of a power, or of a power of powers; sizes are below 2 ** 63


_POWERS: Final = frozenset({"FloatPow", "LShift", "Pow", "PowByNatural"})


def _is_small(expression: ast.expr) -> bool:
    """Say whether evaluating an expression takes no time to speak of: bounded numbers, powers and length."""
    for count, node in enumerate(ast.walk(expression)):
        value = node.value if isinstance(node, ast.Constant) else 0
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Float":
            value = _float(node.args[0])
        if count > _MOST_NODES or (isinstance(value, int | float) and not _is_bounded(value)):
            return False
    return _degree(expression) <= _MOST_DEGREE


def _is_bounded(value: float) -> bool:
    return math.isfinite(value) and (isinstance(value, float) or abs(value) <= 2**64)


def _float(argument: ast.expr) -> float:
    """Return the number of `Float('0.5', precision=53)`, or infinity for one that a double cannot hold."""
    text = str(argument.value) if isinstance(argument, ast.Constant) else ""
    return float(text) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d{1,3})?", text) else math.inf


def _degree(node: ast.expr | ast.keyword) -> float:
    """Return the highest power in an expression, infinite where an exponent is no small number."""
    parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr | ast.keyword)]
    match node:
        case ast.BinOp(left=base, op=ast.Pow() | ast.LShift(), right=exponent):
            return _exponent(exponent) * max(_degree(base), 1)
        case ast.Call(func=ast.Name(id=name), args=[base, exponent]) if name in _POWERS:
            return _exponent(exponent) * max(_degree(base), 1)
        case ast.Call(func=ast.Attribute(attr="pow"), args=[base, exponent]):  # math.pow
            return _exponent(exponent) * max(_degree(base), 1)
    return max(map(_degree, parts), default=0)


def _exponent(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return abs(value)
        case ast.UnaryOp(operand=operand):
            return _exponent(operand)
        case ast.Call(func=ast.Name(id="Integer"), args=[number]):
            return _exponent(number)
        case ast.Call(func=ast.Name(id="Rational"), args=[number, _]):
            return _exponent(number)
        case ast.Call(func=ast.Name(id="Float"), args=[text, *_]):
            return abs(_float(text))
    return math.inf


def check_guard(text: Any) -> None:
    """Refuse what is no condition on the sizes of arguments, `L['x'].size()[0] <= 16`: it is evaluated as Python."""
    if not _is_small(_expression(text)):
        raise _foreign_expression(str(text))
    for node in ast.walk(_expression(text)):
        allowed = isinstance(node, _GUARD_NODES)
        if isinstance(node, ast.Name):
            allowed = node.id in _GUARD_NAMES
        elif isinstance(node, ast.Attribute):
            allowed = node.attr in _GUARD_ATTRIBUTES
        if not allowed:
            raise _foreign_expression(str(text))


def _expression(text: Any) -> ast.expr:
    try:
        expression: ast.Expression = ast.parse(text, mode="eval")
    except (SyntaxError, TypeError, ValueError, MemoryError):
        raise _foreign_expression(str(text)) from None
    return expression.body


def _foreign_expression(text: str) -> SavedProgramError:
    return SavedProgramError(f"has the expression {text[:80]!r} where sizes are described", UNTRUSTED)
