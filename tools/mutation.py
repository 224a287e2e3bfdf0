"""Do the tests bite? Changes the product in many small ways and counts what the tests notice.

    python -m specbatch.tools.mutation --areas policy,audit --mutants 120 >scores.json

Mutants live in memory. One process per area collects its tests; a fork of it runs them all once and
notes which functions each test calls. For each mutant of a seeded sample, another fork gets the
mutant's code and runs the tests that call its function, the quickest first, until one fails.
A mutant outside of functions, a constant say, meets all tests of its area. Equivalent mutants count
as survivors. Tests in processes of their own do not see mutants, so they notice none.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import math
import os
import random
import select
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial, reduce
from importlib import import_module
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

ROOT = Path(__file__).resolve().parents[1]
# What is mutated, and the tests that are to notice.
AREAS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "policy": (["pipeline/policy/**/*.py"], ["tests/policy"]),
    "leases": (["pipeline/runtime/leases.py", "pipeline/ledger/sql/leases.py"],
               ["tests/pipeline", "tests/contracts", "tests/ledger"]),
    "claim": (["pipeline/ledger/sql/claim_next.py", "pipeline/ledger/fair_share.py"],
              ["tests/ledger", "tests/contracts"]),
    "verification": (["kernels/verify/reference.py", "pipeline/engines/*/sampling/verification.py"],
                     ["tests/kernels", "tests/engine/test_verification.py"]),
    "accounting": (["pipeline/runtime/device_time.py", "pipeline/ledger/sql/time.py",
                    "pipeline/engines/state/accounting.py"],
                   ["tests/engine/test_time_book.py", "tests/engine/test_service_time.py",
                    "tests/pipeline/test_device_time.py", "tests/contracts",
                    "tests/faults/test_money.py"]),
    "audit": (["pipeline/audit/*.py"],
              ["tests/ledger", "tests/contracts/test_audit_log.py",
               "tests/pipeline/test_auditing.py", "tests/cli/test_audit.py"]),
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], list[ast.cmpop]] = {
    ast.Lt: [ast.LtE(), ast.GtE()], ast.LtE: [ast.Lt(), ast.Gt()],
    ast.Gt: [ast.GtE(), ast.LtE()], ast.GtE: [ast.Gt(), ast.Lt()], ast.Eq: [ast.NotEq()],
    ast.NotEq: [ast.Eq()], ast.Is: [ast.IsNot()], ast.IsNot: [ast.Is()], ast.In: [ast.NotIn()],
    ast.NotIn: [ast.In()],
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], ast.operator] = {
    ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.Div(), ast.Div: ast.Mult(),
    ast.FloorDiv: ast.Mult(), ast.Mod: ast.FloorDiv(), ast.LShift: ast.RShift(),
}  # fmt: skip
LEAST_LIMIT_SEC, LIMIT_TIMES = 60.0, 20.0  # for a mutant's tests, of what they took without it
PASSED, FAILED, HUNG = "passed", "failed", "hung"


@dataclass(frozen=True)
class Mutant:
    """One changed place of a module."""

    path: str
    line: int
    function: str  # its name within the module; empty outside of functions
    was: str
    now: str
    span: tuple[int, int]  # bytes of the file

    def source(self) -> bytes:
        """The module's text with the mutant in it."""
        whole = (ROOT / self.path).read_bytes()
        start, end = self.span
        return whole[:start] + self.now.encode() + whole[end:]


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its text."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, function in _mutable(ast.parse(source)):
        last, column = node.end_lineno or 0, node.end_col_offset or 0
        span = starts[node.lineno - 1] + node.col_offset, starts[last - 1] + column
        was = source[slice(*span)].decode()
        for now in _changes(node):
            yield Mutant(str(path.relative_to(ROOT)), node.lineno, function, was, now, span)


def _mutable(
    node: ast.AST, names: tuple[str, ...] = (), function: str = ""
) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Expressions and statements that decide something, with the outermost function around them:
    no annotation, no text, no assertion."""
    left_out = {"annotation", "returns", "decorator_list", "bases"}
    for key, value in ast.iter_fields(node):
        if key in left_out:
            continue
        inside = function
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and key == "body":
            names_here = (*names, node.name)
            if isinstance(node, ast.FunctionDef) and not function:
                inside = ".".join(names_here)
        else:
            names_here = names
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.Assert):
                if isinstance(child, ast.expr | ast.stmt):
                    yield child, inside
                yield from _mutable(child, names_here, inside)


def _changes(node: ast.expr | ast.stmt) -> Iterator[str]:
    """What may stand in the place of a node."""
    match node:
        case ast.Compare(left, [first, *more], right):
            for other in COMPARISONS[type(first)]:
                yield f"({ast.unparse(ast.Compare(left, [other, *more], right))})"
        case ast.BoolOp(op, values):
            turned = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield f"({ast.unparse(ast.BoolOp(turned, values))})"
        case ast.UnaryOp(ast.Not(), value):
            yield f"({ast.unparse(value)})"
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            yield f"({ast.unparse(ast.BinOp(left, ARITHMETIC[type(op)], right))})"
        case ast.Constant(bool() as value):
            yield str(not value)
        case ast.Constant(int() | float() as value):
            yield f"({value + 1!r})"
        case ast.Return(ast.Compare() | ast.BoolOp() | ast.UnaryOp(ast.Not()) as value):
            yield f"return not ({ast.unparse(value)})"
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return None"
        case (ast.Expr(ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Continue() | ast.Break()
              | ast.Assign([ast.Attribute() | ast.Subscript()])):  # fmt: skip
            yield "pass"


# --- a mutant's code in the place of the module's own ---------------------------------------
def plant(mutant: Mutant) -> None:
    """Give the imported module the mutant's code or constants, wherever they are known by now."""
    module = module_of(mutant.path)
    changed = executed(module, compile(mutant.source(), str(ROOT / mutant.path), "exec"))
    if mutant.function:
        replace_function(module, changed, mutant.function)
        return
    for name, value in list(vars(changed).items()):
        was = vars(module).get(name)
        if name.startswith("__") or was is None:
            continue
        if getattr(value, "__module__", None) == module.__name__ and callable(value):
            _become(was, value)
        elif _is_plain(value) and value != was:
            _set_everywhere(name, was, value)


def module_of(path: str) -> types.ModuleType:
    return import_module(f"specbatch.{path.removesuffix('.py').replace('/', '.')}")


def executed(module: types.ModuleType, code: types.CodeType) -> types.ModuleType:
    """A second module, made from other code. It takes the first one's name for a moment, because
    dataclasses look their module up."""
    changed = types.ModuleType(module.__name__)
    changed.__dict__.update(__file__=module.__file__, __package__=module.__package__)
    sys.modules[module.__name__] = changed
    try:
        exec(code, changed.__dict__)
    finally:
        sys.modules[module.__name__] = module
    return changed


def replace_function(module: types.ModuleType, changed: types.ModuleType, name: str) -> None:
    """Give a function of a module, or a method, the code that it has in the other."""
    was, now = (reduce(_inside, name.split("."), one) for one in (module, changed))
    _become(was, now)


def _inside(owner: Any, name: str) -> Any:
    return vars(owner)[name]


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    return type(value) in (int, float, bool, str)


def _set_everywhere(name: str, was: object, value: object) -> None:
    """Constants are imported by name."""
    for other in list(sys.modules.values()):
        if type(known := getattr(other, "__dict__", {}).get(name)) is type(was) and known == was:
            setattr(other, name, value)


def _become(was: Any, now: Any) -> None:
    """Change a function or a class in place, for others hold it."""
    if isinstance(was, type):
        for name, value in list(vars(now).items()):
            mine = vars(was).get(name)
            if _function_of(mine) is not None and _function_of(value) is not None:
                _become(mine, value)
            elif not name.startswith("__") and _is_plain(value) and mine != value:
                setattr(was, name, value)
        return
    mine, its = _function_of(was), _function_of(now)
    if mine is None or its is None:
        return
    if _is_cached(was):
        was.cache_clear()
    mine.__defaults__, mine.__kwdefaults__ = its.__defaults__, its.__kwdefaults__
    if mine.__code__.co_freevars == its.__code__.co_freevars:
        if "__class__" not in mine.__code__.co_freevars:
            for cell, other in zip(mine.__closure__ or (), its.__closure__ or (), strict=True):
                cell.cell_contents = other.cell_contents
        mine.__code__ = its.__code__


def _function_of(thing: Any) -> types.FunctionType | None:
    """The plain function in a method, a property or what decorators made of it."""
    if isinstance(thing, property):
        thing = thing.fget
    elif isinstance(thing, cached_property):
        thing = thing.func
    while (inner := getattr(thing, "__wrapped__", getattr(thing, "__func__", None))) is not None:
        thing = inner
    return thing if isinstance(thing, types.FunctionType) else None


# --- tests in forks --------------------------------------------------------------------------
@dataclass
class Calls:
    """What a test called of the mutated modules, as (path, function), and how long it took."""

    seconds: float = 0.0
    functions: set[tuple[str, str]] = field(default_factory=set)


def in_fork(work: Callable[[], object]) -> tuple[int, int]:
    """(process id, descriptor to read what it returns from, as JSON)."""
    reads, writes = os.pipe()
    if pid := os.fork():
        os.close(writes)
        return pid, reads
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 1)
        answer = json.dumps(work()).encode()
        with os.fdopen(writes, "wb") as stream:
            stream.write(answer)
        code = 0
    finally:
        os._exit(code)


def answer_of(pid: int, reads: int) -> Any:
    """What a fork returned; None if it ended otherwise."""
    with os.fdopen(reads, "rb") as stream:
        told = stream.read()
    os.waitpid(pid, 0)
    return json.loads(told) if told else None


def passes(item: pytest.Item, following: pytest.Item | None) -> bool:
    reports = runtestprotocol(item, log=False, nextitem=following)
    return not any(report.failed for report in reports)


def noted(items: Sequence[pytest.Item], paths: Sequence[Path]) -> Iterator[tuple[bool, Calls]]:
    """Run all tests; for each, whether it passed, and its calls."""
    called: set[tuple[str, str]] = set()
    for path in paths:
        note_calls(path, called)
    modules = [module_of(str(path.relative_to(ROOT))) for path in paths]
    cached = [one for module in modules for one in vars(module).values() if _is_cached(one)]
    for item, following in zip(items, [*items[1:], None], strict=True):
        called.clear()
        for one in cached:  # else only the first test would call what it keeps
            one.cache_clear()
        started = time.perf_counter()
        passed = passes(item, following)
        yield passed, Calls(time.perf_counter() - started, set(called))


def _is_cached(thing: object) -> bool:
    return hasattr(thing, "cache_clear")


def note_calls(path: Path, called: set[tuple[str, str]]) -> None:
    """Have every outermost function of a module add itself to `called` when it begins."""
    tree = ast.parse(path.read_bytes())
    where = str(path.relative_to(ROOT))
    names = list(_noting(tree, where, ""))
    module = module_of(where)
    vars(module)["__called__"] = called
    changed = executed(module, compile(ast.fix_missing_locations(tree), str(path), "exec"))
    vars(changed)["__called__"] = called  # a function that is a default argument stays there
    for name in names:
        replace_function(module, changed, name)


def _noting(node: ast.Module | ast.ClassDef, where: str, prefix: str) -> Iterator[str]:
    """Put the note into the functions; their names."""
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _noting(child, where, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef):
            name = prefix + child.name
            child.body[:0] = ast.parse(f"__called__.add(({where!r}, {name!r}))").body
            yield name


class Judge:
    """A pytest plugin that runs the collected tests against mutants instead of once."""

    def __init__(self, area: str, count: int, seed: int, processes: int) -> None:
        self.area, self.count, self.seed, self.processes = area, count, seed, processes
        self.result: dict[str, Any] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        paths = sorted({path for pattern in AREAS[self.area][0] for path in ROOT.glob(pattern)})
        every = [mutant for path in paths for mutant in mutants_of(path)]
        drawn = random.Random(f"{self.area} {self.seed}")
        sample = drawn.sample(every, min(self.count, len(every)))
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # forks share it
        items = session.items
        calls = self._calls(items, paths)
        results = self._judged(sample, items, calls)
        survivors = [asdict(m) for m in sample if results[m] == PASSED]
        killed = len(sample) - len(survivors)
        self.result = {
            "of": len(every), "mutants": len(sample), "killed": killed,
            "hung": sum(result == HUNG for result in results.values()),
            "wilson_95": wilson(killed, len(sample)), "survivors": survivors,
        }  # fmt: skip
        return True

    def _calls(self, items: Sequence[pytest.Item], paths: Sequence[Path]) -> list[Calls]:
        def work() -> object:
            return [
                (passed, calls.seconds, sorted(calls.functions))
                for passed, calls in noted(items, paths)
            ]

        told = answer_of(*in_fork(work))
        if told is None:
            raise pytest.UsageError(f"the process that ran the tests of {self.area} died")
        failing = [
            item.nodeid for item, (passed, *_) in zip(items, told, strict=True) if not passed
        ]
        if failing:
            raise pytest.UsageError(f"they fail without a mutant: {', '.join(failing)}")
        return [Calls(seconds, {(p, f) for p, f in functions}) for _, seconds, functions in told]

    def _judged(
        self, sample: Sequence[Mutant], items: Sequence[pytest.Item], calls: Sequence[Calls]
    ) -> Mapping[Mutant, str]:
        waiting = list(reversed(sample))
        running: dict[int, tuple[Mutant, int, float]] = {}  # by process id: its pipe, its deadline
        results: dict[Mutant, str] = {}
        while waiting or running:
            while waiting and len(running) < self.processes:
                mutant = waiting.pop()
                order = tests_of(mutant, calls)
                seconds = sum(calls[number].seconds for number in order)
                limit = time.monotonic() + max(LEAST_LIMIT_SEC, LIMIT_TIMES * seconds)
                chosen = [items[number] for number in order]
                pid, reads = in_fork(partial(verdict, mutant, chosen))
                running[pid] = (mutant, reads, limit)
            left = min(limit for _, _, limit in running.values()) - time.monotonic()
            ready, _, _ = select.select([reads for _, reads, _ in running.values()], [], [],
                                        max(left, 0.0))  # fmt: skip
            for pid, (mutant, reads, limit) in list(running.items()):
                hung = reads not in ready and time.monotonic() >= limit
                if hung or reads in ready:  # it answered, or it ended
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)  # what its tests started, too
                    told = answer_of(pid, reads)
                    results[mutant] = HUNG if hung else told or FAILED
                    del running[pid]
                    said = f"{self.area} {len(results)}/{len(sample)} {results[mutant]}"
                    print(f"{said}: {mutant.path}:{mutant.line}", file=sys.stderr, flush=True)
        return results


def tests_of(mutant: Mutant, calls: Sequence[Calls]) -> list[int]:
    """The numbers of the tests that may notice a mutant, the quickest first."""
    called = (mutant.path, mutant.function)
    may = [n for n, one in enumerate(calls) if not mutant.function or called in one.functions]
    return sorted(may, key=lambda number: calls[number].seconds)


def verdict(mutant: Mutant, items: Sequence[pytest.Item]) -> str:
    """Whether the tests pass with the mutant, as they do where there are none. What it breaks at
    import counts as noticed."""
    plant(mutant)
    for item, following in zip_longest(items, items[1:]):
        if not passes(item, following):
            item.session._setupstate.teardown_exact(None)
            return FAILED
    return PASSED


def wilson(killed: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    z, share = 1.96, killed / count
    middle, wide = share + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return (middle - half) / wide, (middle + half) / wide


def score(area: str, count: int, seed: int, processes: int, tier: str) -> dict[str, Any]:
    """Run an area's sample and say what survived."""
    judge = Judge(area, count, seed, processes)
    quiet = ["-p", "no:cacheprovider", "-p", "no:terminal", "-p", "no:xdist", "-p", "no:timeout"]
    kept = ["-o", "tmp_path_retention_policy=none", "-o", "addopts=--import-mode=importlib"]
    tests = [str(ROOT / path) for path in AREAS[area][1]]
    code = pytest.main([*quiet, *kept, f"--tier={tier}", *tests], plugins=[judge])
    if not judge.result:
        raise SystemExit(f"error: the tests of {area} could not be run (pytest said {code})")
    return judge.result


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation scores of the areas, as JSON.")
    parser.add_argument("--areas", default=",".join(AREAS))
    parser.add_argument("--mutants", type=int, default=120, help="of each area")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tier", default="unit", help="of the tests, as pytest takes it")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads do not outlive a fork
    areas = asked.areas.split(",")
    if len(areas) == 1:
        [area] = areas
        found = score(area, asked.mutants, asked.seed, asked.processes, asked.tier)
        print(json.dumps({area: found}), flush=True)
        return
    for area in areas:  # each in a process of its own: modules are collected once
        options = [f"--{name}={value}" for name, value in vars(asked).items() if name != "areas"]
        command = [sys.executable, "-m", "specbatch.tools.mutation", f"--areas={area}", *options]
        if subprocess.run(command).returncode:
            sys.exit(1)


if __name__ == "__main__":
    main()
