"""Small tokenizers of the three kinds that models have: byte-level, and SentencePiece-like with and without bytes."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from aengine.model.tokenizer import Tokenizer

PIECES = ["▁", "▁a", "a", "b", "▁hello", "▁world", "wor", "ld", ".", "é", "日", "▁▁", "\N{REPLACEMENT CHARACTER}"]


def byte_level(*words: str) -> Tokenizer:
    """Ids 0 to 255 are the bytes, then come `words`, and a special token "<end>" last."""
    alphabet = {chr_of: byte for byte, chr_of in enumerate(byte_alphabet())}
    vocab = dict(alphabet)
    for word in words:
        vocab["".join(byte_alphabet()[byte] for byte in word.encode())] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return finished(backend)


def metaspace(*, with_bytes: bool) -> Tokenizer:
    """`PIECES`, and with bytes those as "<0x00>" to "<0xFF>" behind them; a special token "<end>" last."""
    vocab = {piece: number for number, piece in enumerate(PIECES)}
    if with_bytes:
        vocab |= {f"<0x{byte:02X}>": len(PIECES) + byte for byte in range(256)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.decoder = (
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        if with_bytes
        else decoders.Metaspace()
    )
    return finished(backend)


def finished(backend: tokenizers.Tokenizer) -> Tokenizer:
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    end = backend.token_to_id("<end>")
    return Tokenizer(backend=backend, special_tokens={"eos_token": "<end>"}, eos_token_ids=(end,))


def byte_alphabet() -> list[str]:
    """The characters that stand for the 256 bytes (Radford et al. 2019, GPT-2): printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
