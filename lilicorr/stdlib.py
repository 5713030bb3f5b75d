"""Functions of Python's standard library as material for a small target and its prompts.

Every installation of Python carries some thirty thousand functions with known quality and licence,
so the `demo` profile needs no download: `pipelines/pretrain.py` trains the embedded target on
`training_documents`, and `lilicorr.prompts` takes `prompts` as its conversations. A prompt is the head
of a function (signature and docstring); the answer is its body.

About three percent of the modules are held out by a hash of their dotted name. They never appear in
training, and their functions are the held-out prompts.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

TEST_PACKAGES = frozenset({"test", "tests", "idle_test"})
NOT_PROMPTED = frozenset({"idlelib", "turtledemo", "lib2to3"})
# Tables of code points and of build settings: text, but nothing to learn Python from.
NOT_PROSE = ("encodings.", "_sysconfigdata", "pydoc_data.", "lib2to3.tests.data")
INDENT = 4
HELD_OUT_PER_MILLE = 30


@dataclass(frozen=True)
class Function:
    """One function: `head + "\\n" + body` is Python source at column 0.

    `name` is qualified by its classes, `head` holds decorators, signature and docstring, and `body` is
    the rest, indented by four spaces.
    """

    module: str
    name: str
    head: str
    body: str
    has_docstring: bool


@dataclass(frozen=True)
class Document:
    """One training document: a conversation (`prompt` -> `text`) or, with an empty prompt, raw text."""

    kind: Literal["documented", "plain", "test", "module"]
    module: str
    prompt: str
    text: str


def stdlib_root() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def iter_modules(root: Path) -> Iterator[tuple[str, str]]:
    """Yield `(dotted module name, source text)` of every readable module below `root`, sorted by path.

    Folders whose name is no identifier (site-packages, lib-dynload) hold no standard library. Files
    that do not decode (the test suite has some on purpose) are skipped.
    """
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if not all(part.isidentifier() for part in parts) or "__pycache__" in parts:
            continue
        if parts[:3] == ("lib2to3", "tests", "data"):
            continue
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        try:
            with tokenize.open(path) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield module, text.replace("\f", "")


def is_held_out(module: str) -> bool:
    """Tell whether a module (dotted name) is held out of every training set.

    The `person` string is the seed of the split; this one spreads the held-out prompts over many
    modules (17 on Python 3.11).
    """
    digest = hashlib.blake2b(module.encode(), digest_size=8, person=b"prompts").digest()
    return int.from_bytes(digest, "big") % 1000 < HELD_OUT_PER_MILLE


def is_test(module: str) -> bool:
    """Tell whether a module (dotted name) belongs to a test suite."""
    return not TEST_PACKAGES.isdisjoint(module.split("."))


def iter_functions(root: Path, include_tests: bool) -> Iterator[Function]:
    """Yield the functions and methods (not the nested functions) of every parsable module, in order."""
    for module, text in iter_modules(root):
        if include_tests or not is_test(module):
            yield from functions_of(module, text)


def functions_of(module: str, text: str) -> Iterator[Function]:
    """Yield the functions of one module's source; nothing if the text is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in string literals
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    for name, node in _walk(tree.body, ""):
        function = _extract(module, name, node, lines)
        if function is not None:
            yield function


def _walk(statements: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, FunctionNode]]:
    """Yield `(qualified name, node)` of functions in classes, conditionals and at module level."""
    for node in statements:
        if isinstance(node, FunctionNode):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _walk(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.If | ast.Try):
            yield from _walk(node.body, prefix)
            yield from _walk(node.orelse, prefix)


def _extract(module: str, name: str, node: FunctionNode, lines: list[str]) -> Function | None:
    """Cut one function out of its module's lines; None if it has no body or an unusual layout."""
    column = node.col_offset
    start = _first_line(node)
    has_docstring = ast.get_docstring(node, clean=False) is not None
    statements = node.body[1:] if has_docstring else node.body
    if not statements or node.body[0].col_offset != column + INDENT:
        return None
    if has_docstring:
        split = node.body[0].end_lineno
    else:
        split = _first_line(statements[0]) - 1
        while not lines[split - 1].strip() or lines[split - 1].lstrip().startswith("#"):
            split -= 1  # comments above the first statement belong to the body
    if _first_line(statements[0]) <= max(split, node.lineno):
        return None  # `def f(): return 1`, or a statement on the docstring's line
    head = _dedent(lines[start - 1 : split], column)
    body = _dedent(lines[split : node.end_lineno], column)
    if "\t" in head or "\t" in body:
        return None
    return Function(module, name, head, body, has_docstring)


def _first_line(node: ast.stmt) -> int:
    """Return the line (from 1) on which a statement starts, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _dedent(lines: list[str], column: int) -> str:
    """Remove `column` leading blanks where present, trailing blanks, and blank lines at both ends."""
    cut = [line[column:] if not line[:column].strip() else line for line in lines]
    return "\n".join(line.rstrip() for line in cut).strip("\n")


def is_prompt(function: Function) -> bool:
    """Tell whether a function is a prompt: documented, two lines or more, from a real module."""
    return (
        function.has_docstring
        and sum(bool(line.strip()) for line in function.body.split("\n")) >= 2
        and not is_test(function.module)
        and function.module.split(".")[0] not in NOT_PROMPTED
    )


def prompts(root: Path, held_out: bool) -> list[Function]:
    """Return the prompts of the training modules or of the held-out ones, each head once.

    A head that occurs in both parts belongs to the training part only.
    """
    functions = [function for function in iter_functions(root, False) if is_prompt(function)]
    training = {f.head: f for f in reversed(functions) if not is_held_out(f.module)}
    if not held_out:
        return list(reversed(training.values()))
    unseen = {f.head: f for f in reversed(functions) if f.head not in training}
    return list(reversed(unseen.values()))


def prompt_messages(function: Function) -> list[dict[str, str]]:
    """Return the conversation that asks for a function's body, in chat-template form."""
    return [{"role": "user", "content": function.head}]


def training_documents(root: Path) -> Iterator[Document]:
    """Yield the functions and then the whole text of every module that is not held out.

    The text of test modules is left out: their functions already outnumber all others.
    """
    for module, text in iter_modules(root):
        if is_held_out(module):
            continue
        for function in functions_of(module, text):
            if is_test(module):
                kind = "test"
            else:
                kind = "documented" if function.has_docstring else "plain"
            yield Document(kind, module, function.head, function.body)
        if not is_test(module) and not module.startswith(NOT_PROSE):
            yield Document("module", module, "", text)


@dataclass(frozen=True)
class Completion:
    """A target's answer to a function's head: the new `token_ids` and their text without the end token.

    `ended` tells whether the target ended it; `parsed` whether head and body together are Python.
    """

    function: Function
    token_ids: list[int]
    body: str
    ended: bool

    @property
    def parsed(self) -> bool:
        """Tell whether `head + body` is Python; a truncated body is first cut after its last full line."""
        return parses(self.function.head, self.body, truncated=not self.ended)


def complete(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, function: Function, max_new_tokens: int
) -> Completion:
    """Answer a function's head greedily with at most `max_new_tokens` tokens."""
    prompt = tokenizer.apply_chat_template(
        prompt_messages(function), add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)
    ids = output[0, prompt["input_ids"].shape[1] :].tolist()
    ended = ids[-1] == tokenizer.eos_token_id
    return Completion(function, ids, tokenizer.decode(ids[:-1] if ended else ids), ended)


def summarise(answers: Sequence[Completion]) -> dict[str, Any]:
    """Return rates (shares of the answers), the mean length (tokens) and ten of the answers.

    A loop has a period of at most 8 tokens (`find_loop`); `repeat_rate` also counts repeated lines, 64
    tokens with a period of at most 32.
    """
    loops = [find_loop(answer.token_ids) for answer in answers]
    repeats = [find_loop(answer.token_ids, window=64, max_period=32) for answer in answers]
    shares = {
        "ended_rate": [answer.ended for answer in answers],
        "parse_rate": [answer.parsed for answer in answers],
        "loop_rate": [end is not None for end in loops],
        "loop_rate_first_64_tokens": [end is not None and end <= 64 for end in loops],
        "repeat_rate": [end is not None for end in repeats],
    }
    lengths = [len(answer.token_ids) for answer in answers]
    samples = [
        {"head": answer.function.head, "body": answer.body, "ended": answer.ended, "parsed": answer.parsed}
        for answer in answers
    ]
    return {
        "prompts": len(answers),
        **{name: round(sum(marks) / len(answers), 3) for name, marks in shares.items()},
        "mean_answer_tokens": round(sum(lengths) / len(answers), 1),
        "samples": samples[:: max(1, len(answers) // 10)][:10],
    }


def parses(head: str, body: str, truncated: bool) -> bool:
    """Tell whether `head + body` is Python; a truncated body is first cut after its last full line."""
    lines = body.split("\n")
    if truncated:
        lines = lines[:-1]
    if not any(line.strip() for line in lines):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse("\n".join([head, *lines]))
    except (SyntaxError, ValueError):
        return False
    return True


def find_loop(token_ids: Sequence[int], window: int = 24, max_period: int = 8) -> int | None:
    """Return the end of the first `window` tokens that repeat with a period of at most `max_period`.

    A window repeats with period p if every token in it, from the p-th on, equals the token p places
    before. None if the sequence has no such window.
    """
    ends = []
    for period in range(1, max_period + 1):
        matches = 0
        for index in range(period, len(token_ids)):
            matches = matches + 1 if token_ids[index] == token_ids[index - period] else 0
            if matches == window - period:
                ends.append(index + 1)
                break
    return min(ends, default=None)
