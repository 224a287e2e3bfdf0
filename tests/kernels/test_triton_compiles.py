"""Triton's compiler takes the kernels, for a GPU that need not be there.

In a process of its own, which compiles one after the other: in this one Triton may be its
interpreter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton

from specbatch.kernels.linear.triton import SHARED_BYTES_OF_TILES, TILES, Tile
from specbatch.kernels.paged_attention.triton import CHUNK_TOKENS, TILE_TOKENS

pytestmark = pytest.mark.pipeline  # compiles for a GPU

COMPILE = """
import importlib, json, re, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

for line in sys.stdin:
    module, kernel, types, constants, fuse, *more = json.loads(line)
    options = more[0] if more else {}
    function = getattr(importlib.import_module(f"specbatch.kernels.{module}.triton"), kernel)
    names = function.arg_names
    source = ASTSource(
        function,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    target = GPUTarget("cuda", 90, 32)
    made = compile(source, target=target, options={"enable_fp_fusion": fuse} | options)
    code = made.asm["ptx"]
    print(json.dumps({
        "fused": len(re.findall(r"\\bfma\\.rn", code)),
        "tensor cores": len(re.findall(r"\\bw?g?mma\\.\\w+", code)),
        "divisions": sorted(set(re.findall(r"\\bdiv\\.\\w+\\.f32", code))),
        "shared": made.metadata.shared,
    }), flush=True)
"""
FLOATS = ("logits", "scores", "temperatures", "bests", "peaks", "sums")
SEARCH = dict.fromkeys(FLOATS, "*fp32") | {
    "counters": "*i64",
    "candidates": "*i32",
    "vocab_size": "i32",
}
ATTEND = {
    "tiles": "*i32",
    "tables": "*i32",
    "scaling": "fp32",
    "window": "i32",
    "softcap": "fp32",
}


SHARED_BYTES = 227 << 10  # that a program may have on sm_90


class Compiler:
    """The process; a kernel that does not compile ends it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, *what: object) -> dict[str, object]:
        if self._process is None:
            self._process = self._begun()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            self.close()
        assert line, (self._folder / "errors").read_text()
        found: dict[str, object] = json.loads(line)
        return found

    def _begun(self) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        with (self._folder / "errors").open("w") as errors:
            return subprocess.Popen(
                [sys.executable, "-c", COMPILE],
                env=environment | {"TRITON_CACHE_DIR": str(self._folder / "cache")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compiler]:
    made = Compiler(tmp_path_factory.mktemp("triton"))
    yield made
    made.close()


def test_noise_compiles_without_a_fused_multiply_add(compiled: Compiler) -> None:
    types = {"counters": "*i64", "out": "*fp32", "vocab_size": "i32"}
    found = compiled("counters", "_gumbel", types, {"stream": 0, "tile": 1024}, False)
    assert found["fused"] == 0


@pytest.mark.parametrize("filtered", [False, True], ids=["one pass", "filtered"])
def test_verification_compiles_and_divides_as_torch_does(
    compiled: Compiler, filtered: bool
) -> None:
    constants = {"filtered": filtered, "sampled": True, "with_sum": True, "tile": 1024}
    found = compiled("verify", "_search_tile", SEARCH, constants, False)
    assert found["fused"] == 0
    assert found["divisions"] == ([] if filtered else ["div.rn.f32"])


def test_running_sums_compile(compiled: Compiler) -> None:
    types = {"x": "*fp32", "out": "*fp32", "width": "i32"}
    assert not compiled("verify", "_add_up", types, {"tile": 1024}, True)["tensor cores"]


@pytest.mark.parametrize(("dtype", "precision"), [("bf16", "tf32"), ("fp32", "ieee")])
def test_attention_compiles_with_tensor_cores_for_caches_of_16_bits(
    compiled: Compiler, dtype: str, precision: str
) -> None:
    caches = dict.fromkeys(("query", "key_cache", "value_cache", "out"), f"*{dtype}")
    shape = {"kv_heads": 8, "group": 4, "head_dim": 64, "block_size": 16, "chunk": 64}
    constants = shape | {"rows": 32, "columns": 64, "precision": precision}
    constants |= {"has_window": True, "has_softcap": True}
    found = compiled("paged_attention", "_attend", caches | ATTEND, constants, True)
    assert bool(found["tensor cores"]) == (dtype == "bf16")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group"),
    [
        *(("bf16", head_dim, group) for head_dim in (64, 128, 256) for group in (1, 8)),
        *(("bf16", 128, group) for group in (4, 7)),
        ("fp32", 128, 4),
        *(pytest.param("bf16", dim, 7, marks=pytest.mark.long) for dim in (64, 256)),
        *(pytest.param("bf16", dim, 4, marks=pytest.mark.long) for dim in (64, 256)),
        pytest.param("fp32", 64, 8, marks=pytest.mark.long),
        *(pytest.param("fp32", 256, group, marks=pytest.mark.long) for group in (4, 7, 8)),
    ],
)
def test_attention_of_all_shapes_fits_into_shared_memory(
    compiled: Compiler, dtype: str, head_dim: int, group: int
) -> None:
    caches = dict.fromkeys(("query", "key_cache", "value_cache", "out"), f"*{dtype}")
    constants = {"kv_heads": 8, "group": group, "head_dim": head_dim, "block_size": 32}
    rows = triton.next_power_of_2(max(16, TILE_TOKENS * group))
    constants |= {"chunk": CHUNK_TOKENS, "rows": rows, "columns": head_dim}
    constants |= {"precision": "ieee" if dtype == "fp32" else "tf32"}
    constants |= {"has_window": True, "has_softcap": True}
    found = compiled("paged_attention", "_attend", caches | ATTEND, constants, True)
    assert found["shared"] <= SHARED_BYTES


@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.rows}x{t.columns}")
def test_every_tile_of_a_product_fits_into_the_shared_memory_it_asks_for(
    compiled: Compiler, tile: Tile
) -> None:
    types = dict.fromkeys(("x", "weight", "bias", "out"), "*bf16") | {"rows": "i32"}
    constants = {"inputs": 4096, "has_bias": False, "precision": "tf32", "widen": False}
    constants |= {"tile_rows": tile.rows, "tile_columns": tile.columns, "tile_inputs": tile.inputs}
    how = {"num_warps": tile.warps, "num_stages": tile.stages}
    found = compiled("linear", "_multiply", types | {"outputs": "i32"}, constants, True, how)
    assert found["tensor cores"]
    assert found["shared"] <= SHARED_BYTES_OF_TILES


@pytest.mark.parametrize(
    ("dtype", "precision"), [("bf16", "tf32"), ("fp16", "tf32"), ("fp32", "ieee")]
)
def test_linear_layers_compile_with_tensor_cores_for_16_bits(
    compiled: Compiler, dtype: str, precision: str
) -> None:
    types = dict.fromkeys(("x", "weight", "bias", "out"), f"*{dtype}")
    types |= {"rows": "i32", "outputs": "i32"}
    constants = {"inputs": 1000, "has_bias": True, "precision": precision, "widen": False}
    constants |= dict.fromkeys(("tile_rows", "tile_columns", "tile_inputs"), 64)
    found = compiled("linear", "_multiply", types, constants, True)
    assert bool(found["tensor cores"]) == (dtype != "fp32")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_norms_compile(compiled: Compiler, dtype: str) -> None:
    types = dict.fromkeys(("x", "weight", "out"), f"*{dtype}") | {"eps": "fp32", "offset": "fp32"}
    constants = {"width": 1000, "columns": 1024, "round_first": True}
    assert compiled("rms_norm", "_normalise", types, constants, True)["divisions"]
