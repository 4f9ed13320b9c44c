"""How many threads loops in the generated code use, where their number is not known before they run."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["thread_policy"]

# How many elements of a loop each thread gets at least. torch's own 512 (`cpp.min_chunk_size`) are computed in a tenth
# of a microsecond, and starting a second thread takes some.
_LEAST_PER_THREAD = 4096


def thread_policy() -> list[tuple[Any, str, Any]]:
    """Return replacements that let small loops run in one thread, although the number of threads is not known.

    torch decides by the size of a loop where the number is known. With `cpp.dynamic_threads` it makes every loop
    parallel, which costs some microseconds each, on many cores more than small models take in all
    (pytorch/pytorch#148937, #154094). Here a loop that is too small for two threads is serial, and any other compares
    its size with the number of threads when it runs.
    """
    from torch._inductor.codegen import cpp as untyped
    from torch._inductor.virtualized import V

    cpp: Any = untyped
    generate, decide, parallel = (
        cpp.CppKernel.codegen_loops_impl,
        cpp.CppKernel.decide_parallel_depth,
        cpp.WorkSharing.parallel,
    )
    conditions = [""]  # of the loops that are being generated

    def generate_loops(kernel: Any, nest: Any, code: Any, regions: Any) -> None:
        size = cpp.cexpr_index(kernel.rename_indexing(cpp.sympy_product(kernel.call_ranges)))
        conditions.append(f"{size} >= {_LEAST_PER_THREAD} * omp_get_max_threads()")
        try:
            generate(kernel, nest, code, regions)
        finally:
            conditions.pop()

    def decide_depth(kernel: Any, deepest: Any, threads: int) -> Any:
        largest = V.graph.sizevars.shape_env.bound_sympy(cpp.sympy_product(kernel.call_ranges)).upper
        if largest < 2 * _LEAST_PER_THREAD:
            return cpp.ParallelDepth(parallel_depth=0, start_depth=deepest.start_depth)
        return decide(kernel, deepest, threads)

    def open_region(regions: Any, threads: int) -> None:
        if regions.in_parallel and regions.condition != conditions[-1]:
            regions.close()
        if not regions.in_parallel:
            code, regions.condition = regions.code, conditions[-1]
            regions.code = _WithCondition(code, conditions[-1])
            parallel(regions, threads)
            regions.code = code

    return [
        (cpp.CppKernel, "codegen_loops_impl", generate_loops),
        (cpp.CppKernel, "decide_parallel_depth", decide_depth),
        (cpp.WorkSharing, "parallel", open_region),
    ]


@dataclasses.dataclass(frozen=True)
class _WithCondition:
    """A buffer of generated code whose parallel regions get a condition."""

    code: Any
    condition: str

    def writeline(self, line: str) -> None:
        opens = line.startswith("#pragma omp parallel")
        self.code.writeline(f"{line} if({self.condition})" if opens else line)

    def indent(self) -> Any:
        return self.code.indent()
