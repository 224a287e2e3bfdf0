"""The decoder pass in C: one call per pass, no Python per layer, bits independent of the batch."""

from __future__ import annotations

import operator
from ctypes import POINTER, Structure, byref, c_float, c_int32, c_void_p

import numpy as np
import torch
from torch import Tensor

from specbatch.kernels.decoder.contract import (
    BLOCK_SIZE,
    DecoderBatch,
    DecoderShape,
    DecoderWeights,
    LayerWeights,
)
from specbatch.kernels.native import NativeUnavailableError, library
from specbatch.kernels.paged_attention.contract import NO_TREES, zeroed_cache

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_ITEM_TOKENS = 8  # tokens of one sequence attended together
_ROW_PADDING = 32  # tiles read whole groups of rows
_SCORE_ROWS = 24  # per thread, as in csrc/model.h
_MAX_HEAD_DIM = 256


class _Linear(Structure):
    _fields_ = (("packed", c_void_p), ("bias", c_void_p), ("n", c_int32), ("k", c_int32))


class _Layer(Structure):
    _fields_ = (
        ("norm1", c_void_p),
        ("norm2", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", _Linear),
        ("o", _Linear),
        ("gate_up", _Linear),
        ("down", _Linear),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class _Model(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("inter", "vocab", "window", "dtype")),
        ("eps", c_float),
        ("scaling", c_float),
        ("embedding", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("norm", c_void_p),
        ("head", _Linear),
        ("layer", POINTER(_Layer)),
    )


class _Batch(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("tokens", "rows", "items", "table_width")),
        *((name, c_void_p) for name in ("ids", "positions", "slots")),
        *((name, c_void_p) for name in ("item_seq", "item_token", "item_count", "tables")),
        ("logit_rows", c_void_p),
        ("logits", c_void_p),
        ("longest", c_int32),
        *((name, c_void_p) for name in ("x", "act", "qkv", "hidden", "scores", "seconds")),
    )


def why_not(shape: DecoderShape, dtype: torch.dtype) -> str | None:
    """Why this decoder cannot run here, or None."""
    if dtype not in _DTYPES:
        return f"{dtype} has no C kernels"
    sizes = {"hidden size": shape.hidden, "intermediate size": shape.inter}
    for name, size in {**sizes, "head dimension": shape.head_dim}.items():
        if size % 32:
            return f"{name} {size} is not a multiple of 32"
    if shape.head_dim > _MAX_HEAD_DIM:
        return f"head dimension {shape.head_dim} is above {_MAX_HEAD_DIM}"
    try:
        library()
    except NativeUnavailableError as error:
        return str(error)
    return None


class Decoder:
    """As `reference.Decoder`. The weights are packed once and held in that form only.

    `model` is the C side's view of them.

    `consume` empties the tensors that were given as soon as they are packed, where they own their
    memory: else twice the model is held until the caller lets go of it.
    """

    def __init__(
        self,
        shape: DecoderShape,
        weights: DecoderWeights,
        num_blocks: int,
        consume: bool = False,
    ) -> None:
        self.kernels = library()
        self._panel = self.kernels.panel()
        self._consume = consume
        self.seconds: np.ndarray | None = None  # [KERNELS] float64, where passes are to be timed
        self._shape = shape
        self.vocab_size = shape.vocab
        self._dtype = weights.embedding.dtype
        self._kept: list[Tensor] = []  # what the C structures point into
        self._caches: list[Tensor] = []  # the same, for keys and values
        self._layers = (_Layer * shape.layers)(
            *(self._layer(layer, num_blocks) for layer in weights.layers)
        )
        self.model = _Model(
            *(getattr(shape, n) for n in ("layers", "hidden", "heads", "kv_heads", "head_dim")),
            *(shape.inter, shape.vocab, shape.window, _DTYPES[self._dtype]),
            shape.eps,
            shape.scaling,
            self._keep(weights.embedding.clone()),  # it may be a view into the whole model file
            self._keep(weights.cos.float()),
            self._keep(weights.sin.float()),
            self._keep(weights.norm.float()),
            self._linear(weights.head, None),
            self._layers,
        )
        self._spend(weights.embedding, weights.head)
        self._work: dict[str, Tensor] = {}
        self._room: tuple[int, ...] = (0, 0, 0)  # tokens, context, threads that it is enough for

    def __del__(self) -> None:
        """A helper thread may be about to look at a layer, long after the pass."""
        if hasattr(self, "model"):
            self.kernels.settle()

    def forward(self, batch: DecoderBatch) -> Tensor:
        """Feed the batch; float32 logits [num_rows, vocab] of the wanted rows."""
        logits = torch.empty(batch.logit_rows.shape[0], self._shape.vocab, dtype=torch.float32)
        threads = torch.get_num_threads()
        arguments, _held = self.arguments(batch, logits, max(batch.ragged.context_lens))
        if self.kernels.decode(byref(self.model), byref(arguments), threads):
            raise MemoryError(f"no memory for a pass of {batch.ids.shape[0]} tokens")
        return logits

    def arguments(
        self, batch: DecoderBatch, logits: Tensor, longest: int
    ) -> tuple[_Batch, tuple[np.ndarray, ...]]:
        """The C structure of a pass, with contexts of up to `longest` tokens, and its tensors."""
        tokens, rows = batch.ids.shape[0], batch.logit_rows.shape[0]
        ragged = batch.ragged
        assert ragged.parents is None, NO_TREES
        items, tables = _items(ragged.query_starts), _tables(ragged.block_tables)
        first_item, count = items.ctypes.data, items.shape[1]
        arguments = _Batch(
            *(tokens, rows, count, tables.shape[1]),
            *map(_address, (batch.ids, batch.positions, ragged.slots)),
            *(first_item, first_item + 4 * count, first_item + 8 * count),
            tables.ctypes.data,
            _address(batch.logit_rows),
            _address(logits),
            longest,
            *self._workspace(max(tokens, rows), longest),
            self.seconds.ctypes.data if self.seconds is not None else None,
        )
        return arguments, (items, tables)

    def memory(self, tokens: int, rows: int, context: int) -> tuple[int, int, int]:
        """Bytes of the weights, of keys and values when every block is in use, and the most that a
        pass of `tokens` tokens and `rows` rows of logits takes besides."""
        sizes = self._sizes(max(tokens, rows), context, torch.get_num_threads()).values()
        work = sum(size * 5 // 4 * dtype.itemsize for size, dtype in sizes)
        work += rows * self._shape.vocab * torch.float32.itemsize
        return sum(t.nbytes for t in self._kept), sum(t.nbytes for t in self._caches), work

    def _sizes(self, tokens: int, longest: int, threads: int) -> dict[str, tuple[int, torch.dtype]]:
        """Elements of each workspace, for a pass of `tokens` tokens or rows."""
        s = self._shape
        wide = -(-tokens // _ROW_PADDING) * _ROW_PADDING
        scores = threads * _SCORE_ROWS * (longest + BLOCK_SIZE)
        return {
            "x": (wide * s.hidden, torch.float32),
            "act": (wide * max(s.hidden, s.heads * s.head_dim), torch.float32),
            "qkv": (wide * (s.heads + 2 * s.kv_heads) * s.head_dim, torch.float32),
            "hidden": (wide * s.inter, torch.float32),
            "scores": (scores, torch.float32),
        }

    def _layer(self, w: LayerWeights, num_blocks: int) -> _Layer:
        s = self._shape
        # Gate and up rows in turns of half a panel, so that one panel of outputs holds both.
        half = self._panel // 2
        gate_up = torch.stack((w.gate.unflatten(0, (-1, half)), w.up.unflatten(0, (-1, half))), 1)
        size = num_blocks * s.kv_heads * s.head_dim * BLOCK_SIZE
        made = _Layer(
            self._keep(w.norm1.float()),
            self._keep(w.norm2.float()),
            self._keep(w.q_norm.float()) if w.q_norm is not None else None,
            self._keep(w.k_norm.float()) if w.k_norm is not None else None,
            self._linear(torch.cat((w.q, w.k, w.v)), w.qkv_bias),
            self._linear(w.o, w.o_bias),
            self._linear(gate_up.flatten(0, 2), None),
            self._linear(w.down, None),
            self._cache(size),
            self._cache(size),
        )
        self._spend(w.q, w.k, w.v, w.o, w.gate, w.up, w.down)
        return made

    def _linear(self, weight: Tensor, bias: Tensor | None) -> _Linear:
        n, k = weight.shape
        packed = torch.empty(-(-n // self._panel) * self._panel * k, dtype=self._dtype)
        weight = weight.to(self._dtype).contiguous()
        self.kernels.pack(_DTYPES[self._dtype], weight.data_ptr(), n, k, packed.data_ptr())
        return _Linear(
            self._keep(packed), self._keep(bias.float()) if bias is not None else None, n, k
        )

    def _keep(self, tensor: Tensor) -> int:
        tensor = tensor.detach().contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _cache(self, size: int) -> int:
        self._caches.append(zeroed_cache((size,), self._dtype, torch.device("cpu")))
        return self._caches[-1].data_ptr()

    def _spend(self, *tensors: Tensor) -> None:
        """Empty tensors that are packed, if that was asked for."""
        if not self._consume:
            return
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.resizable():  # a view into a file is not: it goes when the last one does
                storage.resize_(0)

    def _workspace(self, tokens: int, longest: int) -> list[int]:
        """Addresses of room that only grows. Its rows beyond the batch may hold anything."""
        need = (tokens, longest, torch.get_num_threads())
        if any(map(operator.gt, need, self._room)):
            self._room = tuple(map(max, need, self._room))
            for name, (size, dtype) in self._sizes(*self._room).items():
                if name not in self._work or self._work[name].numel() < size:
                    self._work[name] = torch.zeros(size * 5 // 4, dtype=dtype)
        return [space.data_ptr() for space in self._work.values()]


def _address(tensor: Tensor) -> int:
    assert tensor.is_contiguous(), "the C side reads rows without strides"
    return tensor.data_ptr()


def _items(query_starts: list[int]) -> np.ndarray:
    """Pieces of at most 8 tokens of one sequence: int32 [3, pieces], each one's sequence, first
    token and number of tokens."""
    count = len(query_starts) - 1
    if query_starts[-1] == count:  # one token each, as in every step that only decodes
        return np.array((range(count), range(count), (1,) * count), dtype=np.int32)
    starts = np.array(query_starts, dtype=np.int32)
    lengths = np.diff(starts)
    pieces = -(-lengths // _ITEM_TOKENS)
    seq = np.repeat(np.arange(count), pieces)
    ordinal = np.arange(len(seq)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    first = starts[seq] + ordinal * _ITEM_TOKENS
    return np.array((seq, first, np.minimum(starts[seq + 1] - first, _ITEM_TOKENS)), dtype=np.int32)


def _tables(tables: list[list[int]]) -> np.ndarray:
    """Block tables as one int32 [num_seqs, width] array."""
    width = max(map(len, tables))
    blocks: list[int] = []
    for table in tables:
        blocks += table
        blocks += (0,) * (width - len(table))
    return np.array(blocks, dtype=np.int32).reshape(-1, width)
