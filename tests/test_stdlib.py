"""The standard library as material: extraction, held-out modules, prompts, and how answers are judged."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from lilicorr import stdlib

SOURCE = '''\
import os

@decorate
def plain(a,
          b):
    # a comment of the body
    x = a  \n
    return x

class Outer:
    class Inner:
        async def documented(self):
            """Say what it does.

            More.
            """

            def nested():
                pass
            return nested

    def one_line(self): return 1

    def only_docstring(self):
        """Nothing else."""

if os.name == "nt":
    def conditional(x):
      return "indented by two"
else:
    def conditional(x):
        """Text."""
        return """
kept
"""
'''


@pytest.fixture(scope="module")
def functions() -> list[stdlib.Function]:
    """All functions outside the test suite."""
    return list(stdlib.iter_functions(stdlib.stdlib_root(), include_tests=False))


@pytest.fixture(scope="module")
def split() -> tuple[list[stdlib.Function], list[stdlib.Function]]:
    """Training and held-out prompts."""
    root = stdlib.stdlib_root()
    return stdlib.prompts(root, held_out=False), stdlib.prompts(root, held_out=True)


def test_functions_of_source() -> None:
    found = {function.name: function for function in stdlib.functions_of("package.module", SOURCE)}
    assert list(found) == ["plain", "Outer.Inner.documented", "conditional"]
    plain = found["plain"]
    assert plain.head == "@decorate\ndef plain(a,\n          b):"
    assert plain.body == "    # a comment of the body\n    x = a\n\n    return x"
    assert not plain.has_docstring and plain.module == "package.module"
    documented = found["Outer.Inner.documented"]
    assert documented.head.startswith('async def documented(self):\n    """Say')
    assert documented.head.endswith('    """')
    assert documented.body == "    def nested():\n        pass\n    return nested"
    assert documented.has_docstring
    assert found["conditional"].body == '    return """\nkept\n"""'


def test_unparsable_source_has_no_functions() -> None:
    assert list(stdlib.functions_of("broken", "def f(:\n")) == []
    assert list(stdlib.functions_of("null", "x = '\0'\n")) == []


def test_modules_are_the_standard_library() -> None:
    names = [name for name, _ in stdlib.iter_modules(stdlib.stdlib_root())]
    assert len(names) == len(set(names)) > 1000
    assert {"os", "json", "json.decoder", "test.test_os"} <= set(names)
    assert not any("site-packages" in name or "__pycache__" in name for name in names)


def test_head_and_body_are_python(functions: list[stdlib.Function]) -> None:
    assert len(functions) > 10_000
    for function in functions[::20]:
        tree = ast.parse(f"{function.head}\n{function.body}")
        assert len(tree.body) == 1, function
        node = tree.body[0]
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        assert node.name == function.name.split(".")[-1]
        assert (ast.get_docstring(node, clean=False) is not None) == function.has_docstring
        assert function.body.startswith("    ") and not function.body.endswith("\n")


def test_functions_come_in_a_fixed_order(functions: list[stdlib.Function]) -> None:
    modules = list(dict.fromkeys(function.module for function in functions))
    assert modules == list(dict.fromkeys(m for m, _ in stdlib.iter_modules(stdlib.stdlib_root()) if m in set(modules)))
    assert not any(stdlib.is_test(module) for module in modules)
    assert stdlib.is_test("test.test_os") and not stdlib.is_test("unittest.case")


def test_held_out_modules_are_fixed() -> None:
    """The published target was trained with this split: changing it would leak held-out modules."""
    for module in ("datetime", "nntplib", "warnings", "argparse", "locale"):
        assert stdlib.is_held_out(module)
    for module in ("os", "typing", "heapq", "json"):
        assert not stdlib.is_held_out(module)
    names = [name for name, _ in stdlib.iter_modules(stdlib.stdlib_root())]
    share = sum(map(stdlib.is_held_out, names)) / len(names)
    assert 0.02 < share < 0.04


def test_prompts(split: tuple[list[stdlib.Function], list[stdlib.Function]]) -> None:
    training, held_out = split
    assert len(training) > 3500
    assert 120 <= len(held_out) <= 260
    heads = Counter(function.head for function in training + held_out)
    assert max(heads.values()) == 1
    for function in training + held_out:
        assert stdlib.is_prompt(function)
        assert stdlib.is_held_out(function.module) == (function in held_out)
    assert len({function.module for function in held_out}) >= 10


def test_prompt_messages(split: tuple[list[stdlib.Function], list[stdlib.Function]]) -> None:
    function = split[0][0]
    assert stdlib.prompt_messages(function) == [{"role": "user", "content": function.head}]


def test_training_documents_hold_no_held_out_module() -> None:
    counts: Counter[str] = Counter()
    for document in stdlib.training_documents(stdlib.stdlib_root()):
        assert not stdlib.is_held_out(document.module)
        assert (document.prompt == "") == (document.kind == "module")
        assert "<|im_" not in document.prompt + document.text
        counts[document.kind] += 1
    assert counts["documented"] > 5000 and counts["plain"] > 7000
    assert counts["test"] > 20_000 and counts["module"] > 400


def test_parses() -> None:
    head = "def f(x):"
    assert stdlib.parses(head, "    return x", truncated=False)
    assert not stdlib.parses(head, "    return (x", truncated=False)
    assert stdlib.parses(head, "    y = x\n    return (x", truncated=True)
    assert not stdlib.parses(head, "    return x", truncated=True)  # nothing is left
    assert not stdlib.parses(head, "", truncated=False)
    assert not stdlib.parses(head, "    return '\0'", truncated=False)


@pytest.mark.parametrize("period", [1, 3, 8])
def test_find_loop(period: int) -> None:
    prefix = list(range(100, 110))
    cycle = list(range(period))
    loop = (cycle * 24)[:24]
    assert stdlib.find_loop(prefix + loop) == 34
    assert stdlib.find_loop(prefix + loop + [7, 9, 11] + loop) == 34
    assert stdlib.find_loop(prefix + loop[:-1]) is None
    assert stdlib.find_loop(prefix + loop[:-1] + [99]) is None


def test_find_loop_ignores_long_periods() -> None:
    assert stdlib.find_loop(list(range(9)) * 10) is None
    assert stdlib.find_loop(list(range(9)) * 10, window=27, max_period=9) == 27
    assert stdlib.find_loop([]) is None


def test_summarise() -> None:
    function = stdlib.Function("m", "f", "def f(x):", "    return x", False)
    ended = stdlib.Completion(function, [5, 6, 2], "    return x", ended=True)
    looped = stdlib.Completion(function, [7] * 97, "    (((", ended=False)
    summary = stdlib.summarise([ended, looped])
    assert summary["prompts"] == 2
    assert summary["ended_rate"] == summary["parse_rate"] == 0.5
    assert summary["loop_rate"] == summary["loop_rate_first_64_tokens"] == summary["repeat_rate"] == 0.5
    assert summary["mean_answer_tokens"] == 50.0
    assert [sample["ended"] for sample in summary["samples"]] == [True, False]
