"""Do the tests bite? Changes the product in many small ways and counts what the tests notice.

    python -m specbatch.tools.mutation --areas policy,audit --mutants 120 >scores.json

Each mutant of an area's seeded sample is written into its module, the area's tests run until one
fails, and the module is put back, after Ctrl-C too. Equivalent mutants count as survivors. Only one
run at a time: the mutants are in the working tree.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# What is mutated, and the tests that are to notice.
AREAS: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "policy": (["pipeline/policy/**/*.py"], ["tests/policy"]),
    "leases": (["pipeline/runtime/leases.py", "pipeline/ledger/sql/leases.py"],
               ["tests/pipeline/test_leases.py", "tests/contracts"]),
    "claim": (["pipeline/ledger/sql/claim_next.py", "pipeline/ledger/fair_share.py"],
              ["tests/ledger/test_claim_next.py", "tests/ledger/test_fair_share.py",
               "tests/contracts"]),
    "verification": (["kernels/verify/reference.py", "pipeline/engines/*/sampling/verification.py"],
                     ["tests/kernels", "tests/engine/test_verification.py"]),
    "accounting": (["pipeline/runtime/device_time.py", "pipeline/ledger/sql/time.py",
                    "pipeline/engines/exact/state/accounting.py"],
                   ["tests/engine/test_time_book.py", "tests/engine/test_service_time.py",
                    "tests/pipeline/test_device_time.py", "tests/contracts",
                    "tests/faults/test_money.py"]),
    "audit": (["pipeline/audit/*.py"],
              ["tests/ledger/test_digests.py", "tests/contracts/test_audit_log.py",
               "tests/ledger/test_tampering.py", "tests/pipeline/test_auditing.py",
               "tests/cli/test_audit.py"]),
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
KEPT_BESIDE, LIMIT_SEC = ".unmutated", 1800.0


@dataclass(frozen=True)
class Mutant:
    """One changed place of a module."""

    path: str
    line: int
    was: str
    now: str
    span: tuple[int, int]  # bytes of the file


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a module, in the order of its text."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _mutable(ast.parse(source)):
        last, column = node.end_lineno or 0, node.end_col_offset or 0
        span = starts[node.lineno - 1] + node.col_offset, starts[last - 1] + column
        was = source[slice(*span)].decode()
        for now in _changes(node):
            yield Mutant(str(path.relative_to(ROOT)), node.lineno, was, now, span)


def _mutable(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Expressions and statements that decide something: no annotation, no text, no assertion."""
    left_out = {"annotation", "returns", "decorator_list", "bases"}
    for value in (value for name, value in ast.iter_fields(node) if name not in left_out):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr | ast.Assert):
                if isinstance(child, ast.expr | ast.stmt):
                    yield child
                yield from _mutable(child)


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


@contextlib.contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The module with the mutant in it; as it was afterwards, whatever happens."""
    path = ROOT / mutant.path
    kept = path.with_name(path.name + KEPT_BESIDE)
    source = path.read_bytes()
    start, end = mutant.span
    try:
        path.replace(kept)
        path.write_bytes(source[:start] + mutant.now.encode() + source[end:])
        yield
    finally:
        if kept.exists():
            kept.replace(path)


def run_tests(tests: Sequence[str]) -> str:
    """`passed`, `failed`, or `hung`."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # a mutant leaves nothing behind
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True,
                               stdout=subprocess.DEVNULL)  # fmt: skip
    try:
        code = process.wait(LIMIT_SEC)
    except subprocess.TimeoutExpired:
        return "hung"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if code in (4, 5):
        raise SystemExit(f"error: pytest found nothing to run: {' '.join(tests)}")
    return "failed" if code else "passed"


def wilson(killed: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    z, share = 1.96, killed / count
    middle, wide = share + z * z / (2 * count), 1 + z * z / count
    half = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    return (middle - half) / wide, (middle + half) / wide


def score(area: str, count: int, seed: int) -> dict[str, Any]:
    """Run an area's sample and say what survived."""
    patterns, tests = AREAS[area]
    paths = sorted({path for pattern in patterns for path in ROOT.glob(pattern)})
    every = [mutant for path in paths for mutant in mutants_of(path)]
    sample = random.Random(f"{area} {seed}").sample(every, min(count, len(every)))
    if run_tests(tests) != "passed":
        raise SystemExit(f"error: the tests of {area} fail without a mutant")
    survivors, hung = [], 0
    for number, mutant in enumerate(sample, 1):
        with planted(mutant):
            result = run_tests(tests)
        hung += result == "hung"
        if result == "passed":
            survivors.append(asdict(mutant))
        said = f"{area} {number}/{len(sample)} {result}: {mutant.path}:{mutant.line}"
        print(said, file=sys.stderr)
    done, killed = len(sample), len(sample) - len(survivors)
    return {"of": len(every), "mutants": done, "killed": killed, "hung": hung,
            "wilson_95": wilson(killed, done), "survivors": survivors}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Mutation scores of the areas, as JSON.")
    parser.add_argument("--areas", default=",".join(AREAS))
    parser.add_argument("--mutants", type=int, default=120, help="of each area")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for kept in ROOT.glob(f"[kp]*/**/*{KEPT_BESIDE}"):  # of a run that was killed
        kept.replace(kept.with_name(kept.name.removesuffix(KEPT_BESIDE)))
    for area in asked.areas.split(","):
        print(json.dumps({area: score(area, asked.mutants, asked.seed)}), flush=True)


if __name__ == "__main__":
    main()
