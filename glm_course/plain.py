"""The chapters' plain code as something to import: a chapter's definitions, without running it.

The slow and obvious versions stand in the chapters and nowhere else. Later chapters, tests and
benchmarks take them from there, so what a reader reads is what the library is held to.
"""

import ast
from functools import cache
from types import ModuleType

import jupytext

from glm_course.claims import CLAIMS

BOOK = CLAIMS.parent
KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


@cache
def plain(chapter: str) -> ModuleType:
    """Imports, functions, classes and UPPERCASE literals of a chapter, "03_linear_attention".

    Nothing else of the chapter runs. Raises FileNotFoundError where there is no such chapter.
    """
    path = BOOK / f"{chapter}.md"
    module = ModuleType(chapter, f"Definitions of {path.name}.")
    for i, cell in enumerate(jupytext.read(path).cells):
        if cell.cell_type == "code":
            kept = [node for node in ast.parse(cell.source).body if _is_definition(node)]
            code = compile(ast.Module(kept, []), f"{path.name}, cell {i}", "exec")
            exec(code, module.__dict__)
    return module


def _is_definition(node: ast.stmt) -> bool:
    """Whether a statement is an import, a function, a class or UPPERCASE = a literal."""
    if not isinstance(node, ast.Assign):
        return isinstance(node, KEPT)
    try:
        ast.literal_eval(node.value)
    except ValueError:
        return False
    return all(isinstance(t, ast.Name) and t.id.isupper() for t in node.targets)
