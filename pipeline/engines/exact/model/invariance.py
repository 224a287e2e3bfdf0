"""Before `bitwise` is promised on a GPU: does a token get the same bits whatever its pass?

Our kernels work in one fixed order, but between them a model calls others, and what those do with
another number of rows is for the device to show. So a few tokens go through the whole model in one
pass, in pieces, and in company.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbatch.kernels.decoder.contract import BLOCK_SIZE
from specbatch.pipeline.engines.exact.model.batch import Chunk, build_batch
from specbatch.pipeline.engines.exact.model.loaded_model import LoadedModel
from specbatch.pipeline.engines.exact.model.torch_decoder import TorchDecoder
from specbatch.pipeline.engines.exact.state.kv_blocks import KvState
from specbatch.schemas.errors import ModelError

PIECES = (1, 2, 4, 5)  # tokens of each pass
COMPANIONS = {"cuda": 300, "cpu": 20}  # sequences of one token; an interpreter is slow


@torch.inference_mode()
def check_rows(decoder: TorchDecoder, model: LoadedModel, num_blocks: int) -> None:
    """Raise `ModelError` if some pass changes a token's logits. Leaves the cache dirty, not used.

    Of a cache with fewer blocks, fewer companions are taken.
    """
    vocab_size = model.folder.vocab_size
    ids = [(7 * i + 3) % vocab_size for i in range(min(sum(PIECES), model.folder.context_tokens))]

    def run(pieces: Sequence[int], companions: int) -> Tensor:
        kv, rows = KvState(blocks=[1]), []
        for size in pieces:
            fed = ids[kv.length : kv.length + size]
            chunks = [Chunk(kv, fed, len(fed))]
            chunks += [
                Chunk(KvState(blocks=[2 + i]), [(5 * i) % vocab_size], 1) for i in range(companions)
            ]
            batch = build_batch(chunks, BLOCK_SIZE, lambda count: count, model.device)
            rows.append(decoder.forward(batch)[: len(fed)].clone())
            kv.length += len(fed)
        return torch.cat(rows)

    whole = run([len(ids)], 0)
    company = min(COMPANIONS[model.device.type], num_blocks - 2)
    for pieces, companions in ((PIECES, 0), ([len(ids)], company)):
        if not torch.equal(run(pieces, companions), whole):
            raise ModelError(
                f"model `{model.folder.ref}` gives a token other bits in another pass on "
                f"`{model.device}`: use `exactness: fast`"
            )
