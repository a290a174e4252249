"""One cold start of a library that compiles at run time: ``python -m gpu.cold.jit_child LIBRARY PROBLEM WHAT``.

LIBRARY is ``flashinfer`` or ``triton`` (fla-core), PROBLEM a folder of ``gpu.cold.write_problem``, WHAT an op or ``model``.
Where they keep what they compiled is for the caller to say, in the environment. Their first call is what makes a kernel
ready: there is no step of its own for it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from gpu.cold.problem import Laps, asked, definition, require_right


def main(library: str, folder: Path, what: str) -> None:
    laps, defined = Laps(), definition(folder)
    problems = {op: defined["problems"][op] for op in asked(what)}
    from gpu.cold import jit_calls  # torch with it

    made = {op: jit_calls.CALLS[library, op] for op in problems}
    modules = {op: importlib.import_module(name) for op, (name, _) in made.items()}
    laps.end("import")
    jit_calls.start()
    laps.end("context")
    calls = {}
    for op, problem in problems.items():
        given = jit_calls.tensors(folder, op, problem)
        calls[op] = made[op][1](modules[op], given, problem["sizes"])
    laps.end("memory")
    results = {op: jit_calls.on_host(call) for op, call in calls.items()}
    laps.end("first_run")
    laps.show()
    for op, problem in problems.items():
        outputs = {name: jit_calls.raw(output) for name, output in results[op].items()}
        require_right(folder, op, problem["outputs"], outputs)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
