"""What the generated code does about values that it cannot compute with: an index out of range, a division by zero.

torch's own generated code throws inside OpenMP regions, which ends the process (pytorch/pytorch#195402), divides
integers by zero, which does too (#143649), and lets a model that threw once keep others waiting for it. Here every
failed check ends as an exception of the call. The path without a failure costs one load for each step of an outer
loop, and only in loops that have a check.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hatch_aoti.errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["guard_kernels", "guard_wrapper", "value_checks"]

# Operators whose eager kernels raise RuntimeError, where others raise IndexError for an index out of range.
_RAISE_RUNTIME_ERROR = ("gather", "scatter", "max_unpool")


def value_checks(inputs: Sequence[str]) -> list[tuple[Any, str, Any]]:
    """Return replacements that give the generated code eager's checks of values.

    `inputs` are the names of the model's inputs, in the order of the compiled graph's.
    """
    from torch._inductor import codecache
    from torch._inductor.codegen import cpp as untyped

    cpp: Any = untyped
    compile_sources = codecache.AotCodeCompiler.compile
    scalar_assert, vector_assert = cpp.CppKernel.indirect_assert, cpp.CppVecKernel.indirect_assert
    vector_floordiv, vector_remainder = cpp.CppVecOverrides.floordiv, cpp.CppVecOverrides.remainder

    def compile_guarded(graph: Any, wrapper: str, kernels: str, *rest: Any, **options: Any) -> Any:
        return compile_sources(graph, guard_wrapper(wrapper), guard_kernels(kernels), *rest, **options)

    def scalar_index(kernel: Any, var: Any, lower: Any, upper: Any, mask: Any = None) -> str:
        return _worded(scalar_assert(kernel, var, lower, upper, mask), upper, inputs)

    def vector_index(kernel: Any, var: Any, lower: Any, upper: Any, mask: Any = None) -> str:
        return _worded(vector_assert(kernel, var, lower, upper, mask), upper, inputs)

    def floordiv(a: Any, b: Any) -> Any:
        return vector_floordiv(a, b if cpp.is_float_dtype(a.dtype) else _only_real(b))

    def remainder(a: Any, b: Any) -> Any:
        return vector_remainder(a, _only_real(b) if cpp.is_integer_dtype(a.dtype) else b)

    def truncdiv(a: Any, b: Any) -> str:
        return f"truncated_quotient({a}, {b})"

    def vector_truncdiv(a: Any, b: Any) -> str:
        one = f"decltype({b})(1)"
        filled = f"decltype({b})::set({one}, {_only_real(b)}, {cpp.cexpr_index(cpp.V.kernel.num_elems)})"
        return f"truncated_quotient({a}, {filled})"

    return [
        (codecache.AotCodeCompiler, "compile", compile_guarded),
        (cpp.CppKernel, "indirect_assert", scalar_index),
        (cpp.CppVecKernel, "indirect_assert", vector_index),
        (cpp.CppOverrides, "truncdiv", staticmethod(truncdiv)),
        (cpp.CppVecOverrides, "truncdiv", staticmethod(vector_truncdiv)),
        (cpp.CppVecOverrides, "floordiv", staticmethod(floordiv)),
        (cpp.CppVecOverrides, "remainder", staticmethod(remainder)),
    ]


def _only_real(divisor: Any) -> Any:
    """Return a vector of divisors with ones where a mask leaves lanes out: they hold zeros that nobody asked for."""
    from torch._inductor.virtualized import V, ops

    kernel: Any = V.kernel
    mask = kernel._load_mask  # noqa: SLF001
    if mask is None:
        return divisor
    chosen = ops.where(mask, divisor, ops.constant(1, divisor.dtype))
    return getattr(chosen, "value", chosen)


def _worded(check: str, upper: str | None, inputs: Sequence[str]) -> str:
    """Return the check of an index with a text that says what eager's does, and whose index it is."""
    from torch._inductor.virtualized import V

    node = getattr(V.kernel, "current_node", None)
    # Before they were decomposed: a loss gathers, too.
    operators = {str(origin.meta.get("original_aten", origin.target)) for origin in _origins(node)}
    plain = any(name.removeprefix("aten.").startswith(_RAISE_RUNTIME_ERROR) for name in operators)
    kind = "RuntimeError" if plain else "IndexError"
    named = _index_input(node, inputs)
    where = f" of `{named}`" if named else ""
    size = f', "; the dimension that it points into has size ", {upper}' if upper else ""
    condition, torchs, _ = check.rpartition(', "index out of bounds: ')
    return f'{condition}, "{kind}: an index{where} is out of range"{size})' if torchs else check


def _origins(node: Any) -> Any:
    return getattr(getattr(node, "node", None), "origins", None) or ()


def _index_input(node: Any, inputs: Sequence[str]) -> str:
    """Return the name of the model's input that a node takes indices from, if there is just one of integers."""
    import torch
    from torch._inductor.virtualized import V

    graph: Any = V.graph
    found = set()
    for read in getattr(getattr(node, "read_writes", None), "reads", ()):
        if read.name in graph.graph_inputs and not graph.get_dtype(read.name).is_floating_point:
            place = list(graph.graph_inputs).index(read.name)
            if graph.get_dtype(read.name) is not torch.bool and place < len(inputs):
                found.add(inputs[place])
    return found.pop() if len(found) == 1 else ""


# What is put before the first kernel.
_FAILURES = """
#include <atomic>
#include <exception>
#include <limits>
#include <stdexcept>
#undef AOTI_TORCH_CHECK
#define AOTI_TORCH_CHECK(condition, ...)                                         \\
  if (C10_UNLIKELY(!(condition))) {                                              \\
    throw std::runtime_error(STD_TORCH_CHECK_MSG(condition, "", ##__VA_ARGS__)); \\
  }

namespace {
// The first exception in an OpenMP region, which none may leave: it is thrown again behind the region.
class Failure {
 public:
  bool seen() const { return seen_.load(std::memory_order_relaxed); }
  void keep() {
    if (!seen_.exchange(true)) {
      first_ = std::current_exception();
    }
  }
  void raise() {
    if (C10_UNLIKELY(seen())) {
      std::rethrow_exception(first_);
    }
  }

 private:
  std::atomic<bool> seen_{false};
  std::exception_ptr first_;
};

// Integers by the rules of C++, but for what ends the process there.
template <typename T, typename U>
  requires(std::is_integral_v<T> && std::is_integral_v<U>)
inline std::common_type_t<T, U> truncated_quotient(T a, U b) {
  using C = std::common_type_t<T, U>;
  const C divisor = static_cast<C>(b);
  if (C10_UNLIKELY(divisor == 0)) {
    throw std::runtime_error("ZeroDivisionError");
  }
  if constexpr (std::is_signed_v<C>) {
    if (C10_UNLIKELY(divisor == C(-1))) {
      return static_cast<C>(0 - static_cast<std::make_unsigned_t<C>>(a));
    }
  }
  return static_cast<C>(a) / divisor;
}
#if INDUCTOR_USE_VECTOR_TYPES()
template <typename T>
inline at::vec::Vectorized<T> truncated_quotient(
    const at::vec::Vectorized<T>& a,
    const at::vec::Vectorized<T>& b) {
  constexpr int size = at::vec::Vectorized<T>::size();
  __at_align__ T x[size], y[size];
  a.store(x);
  b.store(y);
  for (int i = 0; i < size; ++i) {
    x[i] = truncated_quotient(x[i], y[i]);
  }
  return at::vec::Vectorized<T>::loadu(x);
}
template <typename T, int N>
inline at::vec::VectorizedN<T, N> truncated_quotient(
    const at::vec::VectorizedN<T, N>& a,
    const at::vec::VectorizedN<T, N>& b) {
  at::vec::VectorizedN<T, N> result;
  for (int i = 0; i < N; ++i) {
    result[i] = truncated_quotient(a[i], b[i]);
  }
  return result;
}
#endif
} // namespace
"""

_CATCH = " catch (...) { failure.keep(); }"
# Calls that throw; all else in a kernel is arithmetic.
_MAY_THROW = re.compile(r"\w*TORCH_CHECK\(|\b(?:mod|floor_divide_integral|remainder_integral|truncated_quotient)\(")
_PREFIX = re.compile(r"#include [<\"][^\n]*cpp_prefix\.h[>\"]\n")
# torch's own note of a division by zero is one variable for all threads: a call could end with another call's error, or
# write to a kernel that is gone. Without it, the division throws.
_SHARED_FLAG = re.compile(r"^.*\binductor_cpu_(?:integer_div_error|throw_if_integer_div_error)\b.*\n", re.MULTILINE)
_SHARED_FLAG_SET = re.compile(r"^ *inductor_cpu_integer_div_error_flag = .*;\n", re.MULTILINE)
_REGION = re.compile(r"^ *#pragma omp parallel\b(?P<loop> for\b)?[^\n]*\n", re.MULTILINE)
_SHARED_WORK = re.compile(
    r"^ *#pragma omp (?:(?:parallel )?for\b(?:[^\n]*\bcollapse\((?P<loops>\d+)\))?|(?P<single>single)\b)[^\n]*\n",
    re.MULTILINE,
)


def guard_kernels(source: str) -> str:
    """Return generated kernels whose failed checks are exceptions of the kernel's caller, in OpenMP regions, too."""
    source = _SHARED_FLAG_SET.sub("", _SHARED_FLAG.sub("", source))
    pieces, end = [], 0
    for region in _REGION.finditer(source):
        start = region.end()
        if start < end:  # nested in the last one
            continue
        close = _statement_end(source, start)
        body = source[start:close]
        if _MAY_THROW.search(body):
            guarded = _guard_shared_work(source[region.start() : close]) if region["loop"] else _guard_region(body)
            head = "" if region["loop"] else region[0]
            pieces += [source[end : region.start()], "{ Failure failure;\n", head, guarded, "\nfailure.raise(); }"]
        else:
            pieces.append(source[end:close])
        end = close
    pieces.append(source[end:])
    return _PREFIX.sub(lambda found: found[0] + _FAILURES, "".join(pieces), count=1)


def _guard_region(body: str) -> str:
    if _SHARED_WORK.search(body):
        return _guard_shared_work(body)
    return "{ try " + body.strip() + _CATCH + " }"


def _guard_shared_work(text: str) -> str:
    """Guard the steps of loops whose work threads share, and blocks of a single thread: none may be left by a throw."""
    pieces, end = [], 0
    for construct in _SHARED_WORK.finditer(text):
        if construct.start() < end:
            continue
        start = construct.end()
        for _ in range(0 if construct["single"] else int(construct["loops"] or 1)):
            start = _loop_body(text, start)
        close = _statement_end(text, start)
        body = text[start:close]
        if _MAY_THROW.search(body):
            statement = body.strip() if body.lstrip().startswith("{") else "{" + body + "}"
            pieces += [text[end:start], "{ if (!failure.seen()) try ", statement, _CATCH, " }"]
        else:
            pieces.append(text[end:close])
        end = close
    return "".join([*pieces, text[end:]])


def _loop_body(text: str, start: int) -> int:
    """Return where the body of the next loop begins; into its braces, if the body is a loop itself."""
    head = text.index("for", start)
    after = _closing(text, text.index("(", head))
    inner = re.compile(r"\s*\{\s*(?=for\s*\()").match(text, after)
    return inner.end() if inner else after


def _statement_end(text: str, start: int) -> int:
    """Return where the statement ends that begins at `start`: a block, a loop, or one that ends with a semicolon."""
    while True:
        found = re.compile(r"\s*(?:(?:\#[^\n]*\n|//[^\n]*\n)\s*)*(?P<loop>for\s*\()?").match(text, start)
        if found is None:  # not so: it matches the empty text
            break
        if not found["loop"]:
            start = found.end()
            break
        start = _closing(text, found.end() - 1)
    return _closing(text, start) if text[start : start + 1] == "{" else text.index(";", start) + 1


_BRACKETS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|[(){}]')


def _closing(text: str, start: int) -> int:
    """Return the place behind the bracket that closes the one at `start`."""
    depth = 0
    for found in _BRACKETS.finditer(text, start):
        if found[0] in "({":
            depth += 1
        elif found[0] in ")}":
            depth -= 1
            if depth == 0:
                return found.end()
    raise CompileError("torch generated C++ code with unbalanced brackets")


# What torch's interface.cpp has, and what it becomes.
_INTERFACE = (
    (  # the text goes to the caller, not to the screen
        re.compile(r"g_aoti_last_error = e\.what\(\); *\\\n *std::cerr << [^\n]*\\\n"),
        r"g_aoti_last_error = failure_text(e.what()); \\\n",
    ),
    (re.compile(r"#define CONVERT_EXCEPTION_TO_ERROR_CODE"), lambda found: _FAILED_RUN + found[0]),
    (
        re.compile(r"(?:container|model)->run(?:_single_threaded|_impl)?\(\s[^;{]*;\n"),
        lambda found: f"failed_run = nullptr;\n    {found[0]}{_RAISE_FAILED_RUN}",
    ),
)
_FAILED_RUN = """#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <torch/csrc/stable/c/shim.h>

// What stopped the model that this thread runs.
static thread_local std::exception_ptr failed_run;

// Leaves out where torch's code was, and the stack.
static std::string failure_text(const std::string& text) {
  if (text.ends_with(", ZeroDivisionError")) {
    return "ZeroDivisionError";
  }
  const std::string first = text.substr(0, text.find("\\nException raised from"));
  return first == "index out of range in self" ? "IndexError: " + first : first;
}

// An operator's own text, where torch would say which call of its library failed; the type of the error is lost there.
static std::string operator_error(const char* call) {
  const std::string text = torch_exception_get_what_without_backtrace();
  const bool index = text.find("out of range") != text.npos || text.find("out of bounds") != text.npos;
  const bool plain = std::strstr(call, "_gather(") || std::strstr(call, "_scatter");
  return index && !plain ? "IndexError: " + text : text;
}
#undef AOTI_TORCH_ERROR_CODE_CHECK
#define AOTI_TORCH_ERROR_CODE_CHECK(call)             \\
  if ((call) != AOTI_TORCH_SUCCESS) {                 \\
    throw std::runtime_error(operator_error(#call));  \\
  }
#undef AOTI_TORCH_CHECK
#define AOTI_TORCH_CHECK(condition, ...)                                         \\
  if (!(condition)) {                                                            \\
    throw std::runtime_error(STD_TORCH_CHECK_MSG(condition, "", ##__VA_ARGS__)); \\
  }

"""
_RAISE_FAILED_RUN = """    if (failed_run) {
      std::rethrow_exception(std::exchange(failed_run, nullptr));
    }
"""
_RUN_BEGINS = re.compile(r"void AOTInductorModel::run_impl\([^{]*\{\n")
_RUN_ENDS = "} // AOTInductorModel::run_impl"


def guard_wrapper(source: str) -> str:
    """Return the generated code that calls kernels, with which a model that raised can be called again.

    PyTorch's container gives such a model back without waking up the threads that wait for it. So the model's own
    function keeps the exception until the container is left. Raises `CompileError` if this torch's code is another.
    """
    begins = _RUN_BEGINS.search(source)
    if begins is None or _RUN_ENDS not in source:
        raise CompileError("the code that this torch generates has another form than hatch-aoti knows")
    head, body = source[: begins.start()], source[begins.end() :]
    for pattern, replacement in _INTERFACE:
        head, count = pattern.subn(replacement, head)
        if count == 0:
            raise CompileError("the code that this torch generates has another form than hatch-aoti knows")
    body = body.replace(_RUN_ENDS, f"}} catch (...) {{ failed_run = std::current_exception(); }} {_RUN_ENDS}", 1)
    return f"{head}{begins[0]}try {{\n{body}"
